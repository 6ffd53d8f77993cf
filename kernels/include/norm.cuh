// The root-mean-square norm of a row that a block holds in registers, and its FP8 form.
#pragma once
#include "fragment.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {

// kWidth BF16 values, eight to a thread and turn. The sum of squares is float64, as in the reference.
template <int kWidth, int kThreads>
struct NormedRow {
  static_assert(kWidth % 32 == 0, "a row is whole groups of 32");
  static constexpr int kOctets = kWidth / 8, kTurns = (kOctets + kThreads - 1) / kThreads;
  float x[kTurns][8];

  __device__ static int octet(int turn) { return turn * kThreads + threadIdx.x; }

  // `meaning` gets what the codes mean, in the order of fragment.cuh.
  __device__ void finish(const uint16_t* weight, uint16_t* y, uint8_t* codes, uint8_t* scales,
                         uint16_t* meaning = nullptr) {
    double squares = 0.0;
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += double(x[t][i]) * double(x[t][i]);
    const double mean = block_sum<kThreads>(squares) / kWidth;
    const float inverse = float(1.0 / sqrt(mean + double(DSUF_NORM_EPS)));
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const bool inside = octet(t) < kOctets;
      float w[8] = {};
      if (inside) unpack_bf16x8(reinterpret_cast<const uint4*>(weight)[octet(t)], w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[t][i] = round_bf16(__fmul_rn(__fmul_rn(x[t][i], inverse), w[i]));
      if (inside) reinterpret_cast<uint4*>(y)[octet(t)] = pack_bf16x8(x[t]);
      if (codes) quantize_octet<Fp8>(x[t], inside, codes, scales, octet(t));
      if (meaning && inside) store_fragment<kWidth>(meaning, octet(t), x[t]);
    }
  }

  __device__ static void clear(uint16_t* y, uint8_t* codes, uint8_t* scales) {
    for (int i = threadIdx.x; i < kWidth; i += kThreads) {
      y[i] = 0;
      if (codes) codes[i] = 0;
      if (codes && i % 32 == 0) scales[i / 32] = 0;
    }
  }
};

}  // namespace dsuf

// The root-mean-square norm of a row that a block holds in registers, and its FP8 form.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {

// kWidth BF16 values, eight to a thread and turn. The sum of squares is float64, as in the reference.
template <int kWidth, int kThreads>
struct NormedRow {
  static_assert(kWidth % 32 == 0, "a row is whole groups of 32");
  static constexpr int kOctets = kWidth / 8, kTurns = (kOctets + kThreads - 1) / kThreads;
  float x[kTurns][8];
  uint4 weight[kTurns];

  __device__ static int octet(int turn) { return turn * kThreads + threadIdx.x; }

  // Constants, which need not wait for earlier launches.
  __device__ void load_weight(const uint16_t* from) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
      weight[t] = octet(t) < kOctets ? reinterpret_cast<const uint4*>(from)[octet(t)] : make_uint4(0, 0, 0, 0);
  }

  // The row at `from`; zeros where it is padding.
  __device__ void load(const uint16_t* from, bool live) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (live && octet(t) < kOctets) packed = reinterpret_cast<const uint4*>(from)[octet(t)];
      unpack_bf16x8(packed, x[t]);
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) x[t][i] = 0.0f;
  }

  // Norm what is held, rounded to BF16; all threads of the block come here.
  __device__ void norm() {
    double squares = 0.0;
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += double(x[t][i]) * double(x[t][i]);
    const double mean = block_sum<kThreads>(squares) * (1.0 / kWidth);
    const float inverse = float(rsqrt(mean + double(DSUF_NORM_EPS)));
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      float w[8];
      unpack_bf16x8(weight[t], w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[t][i] = round_bf16(__fmul_rn(__fmul_rn(x[t][i], inverse), w[i]));
    }
  }

  // Write what is held, and its FP8 form if `codes` is there; zeros for padding.
  __device__ void put(uint16_t* y, uint8_t* codes, uint8_t* scales, bool live) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int at = octet(t);
      const bool inside = at < kOctets;
      if (inside) reinterpret_cast<uint4*>(y)[at] = live ? pack_bf16x8(x[t]) : make_uint4(0, 0, 0, 0);
      if (!codes) continue;
      quantize_octet<Fp8>(x[t], inside && live, codes, scales, at);
      if (inside && !live) reinterpret_cast<uint2*>(codes)[at] = make_uint2(0, 0);
      if (inside && !live && at % 4 == 0) scales[at / 4] = 0;
    }
  }
};

}  // namespace dsuf

// A sublayer's input from a row's streams, by a cluster of eight blocks of which each has an eighth of the channels.
//
//   u = bf16(sum_i pre[i] * h[i]);   y = bf16(u * rsqrt(mean(u^2) + eps) * weight);   codes, scales = fp8(y)
//
// A share is whole groups of 32 channels. The sum of squares is float64, block by block in their order.
#pragma once
#include "cluster.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {

struct CollapsedShare {
  static constexpr int kThreads = 128, kOctets = DSUF_DIM / 8, kEach = (kOctets + 4 * kClusterBlocks - 1) /
                       (4 * kClusterBlocks) * 4, kTurns = (kEach + kThreads - 1) / kThreads;
  static_assert(DSUF_DIM % 32 == 0, "channels come in whole groups");
  float x[kTurns][8];
  uint4 weight[kTurns];

  // The octet of a row that a thread has in a turn, kOctets where it has none.
  __device__ static int octet(int turn) {
    const int own = turn * kThreads + int(threadIdx.x), at = cluster_rank() * kEach + own;
    return own < kEach && at < kOctets ? at : kOctets;
  }

  // Constants, which need not wait for earlier launches.
  __device__ void load(const uint16_t* from) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      weight[t] = make_uint4(0, 0, 0, 0);
      if (octet(t) < kOctets) weight[t] = reinterpret_cast<const uint4*>(from)[octet(t)];
      for (float& value : x[t]) value = 0.0f;
    }
  }

  // The collapse of an octet whose streams are h, rounded.
  __device__ static void collapse(float (&x)[8], const float (&h)[DSUF_STREAMS][8], const float* pre) {
#pragma unroll
    for (int s = 0; s < DSUF_STREAMS; ++s)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float term = __fmul_rn(h[s][i], pre[s]);
        x[i] = s ? __fadd_rn(x[i], term) : term;
      }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = round_bf16(x[i]);
  }

  // Norm and FP8 form of a row whose collapse the cluster holds; `meaning` gets what the codes mean (fragment.cuh). The
  // caller has come to cluster_start.
  __device__ void finish(Mail& mail, uint16_t* y, uint8_t* codes, uint8_t* scales, uint16_t* meaning) {
    double squares = 0.0;
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += double(x[t][i]) * double(x[t][i]);
    squares = block_sum<kThreads>(squares);
    int turn = 0;
    cluster_started();
    const uint64_t* told = tell_all(mail, turn, uint64_t(__double_as_longlong(squares)));
    double all = 0.0;
#pragma unroll
    for (int rank = 0; rank < kClusterBlocks; ++rank) all += __longlong_as_double(int64_t(told[rank]));
    const float inverse = float(rsqrt(all * (1.0 / DSUF_DIM) + double(DSUF_NORM_EPS)));
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int at = octet(t);
      float w[8];
      unpack_bf16x8(weight[t], w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[t][i] = round_bf16(__fmul_rn(__fmul_rn(x[t][i], inverse), w[i]));
      if (at < kOctets) reinterpret_cast<uint4*>(y)[at] = pack_bf16x8(x[t]);
      if (codes) quantize_octet<Fp8>(x[t], at < kOctets, codes, scales, at);
      if (meaning && at < kOctets) store_fragment<DSUF_DIM>(meaning, at, x[t]);
    }
  }

  // A padding row's share.
  __device__ static void clear(uint16_t* y, uint8_t* codes, uint8_t* scales) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int at = octet(t);
      if (at >= kOctets) continue;
      reinterpret_cast<uint4*>(y)[at] = make_uint4(0, 0, 0, 0);
      if (codes) reinterpret_cast<uint2*>(codes)[at] = make_uint2(0, 0);
      if (codes && at % 4 == 0) scales[at / 4] = 0;
    }
  }
};

}  // namespace dsuf

// A site's mixes from its products: gates, and a doubly stochastic matrix by Sinkhorn rounds.
//
//   a = (sum of partial) * rsqrt(mean(h^2) + eps) * scale + base
//   pre = sigmoid(a[:s]) + hc_eps;  post = 2 sigmoid(a[s:2s]);  comb = sinkhorn(a[2s:])
//   sinkhorn: softmax over each row, + hc_eps; then columns, and (rows, columns) rounds - 1 times; every division is
//   by a sum plus hc_eps; ends on columns
//
// Shapes: MixStreams; streams <= 5. A block of 256 a row adds up the splits, then a warp goes on: each of its lanes has all
// of the matrix, and lane i * s + j writes comb[i, j]. Padding: zeros. Bound: latency; the partial sums are 8 KB a row at
// the released sizes.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kStreams = DSUF_STREAMS, kOutputs = (2 + kStreams) * kStreams, kWidth = kStreams * DSUF_DIM;
constexpr int kSplits = (kWidth + 255) / 256, kAll = kOutputs + 1;
static_assert(kOutputs < 32 * 2 && kStreams * kStreams <= 32, "a warp holds a row");

using Square = float[kStreams][kStreams];

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Divide every row, or column, by its sum plus `more`, then add `then`.
template <bool kRows>
__device__ __forceinline__ void divide_lines(Square& c, float more, float then) {
#pragma unroll
  for (int line = 0; line < kStreams; ++line) {
    float sum = kRows ? c[line][0] : c[0][line];
#pragma unroll
    for (int i = 1; i < kStreams; ++i) sum = __fadd_rn(sum, kRows ? c[line][i] : c[i][line]);
    const float factor = reciprocal(__fadd_rn(sum, more));
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      float& own = kRows ? c[line][i] : c[i][line];
      own = __fadd_rn(__fmul_rn(own, factor), then);
    }
  }
}

// Of one lane, which has all of it: to ask others for their values would take longer than to compute them.
__device__ __forceinline__ void sinkhorn(Square& c) {
  const float eps = DSUF_HC_EPS;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float largest = c[i][0];
#pragma unroll
    for (int j = 1; j < kStreams; ++j) largest = fmaxf(largest, c[i][j]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) c[i][j] = expf(__fadd_rn(c[i][j], -largest));
  }
  divide_lines<true>(c, 0.0f, eps);
  divide_lines<false>(c, eps, 0.0f);
#pragma unroll 1
  for (int round = 1; round < DSUF_SINKHORN_ROUNDS; ++round) {
    divide_lines<true>(c, eps, 0.0f);
    divide_lines<false>(c, eps, 0.0f);
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) mix_streams(const dsuf::MixStreams p) {
  using namespace dsuf;
  constexpr int kParts = 256 / kAll < kSplits ? 256 / kAll : kSplits;
  constexpr int kTurns = (kSplits + kParts - 1) / kParts;
  __shared__ double sums[kParts][kAll];
  __shared__ float affine[kOutputs];
  const int lane = threadIdx.x, output = min(lane, kOutputs - 1);
  const int64_t row = blockIdx.x;
  const bool live = row < early_live(p.live);
  const float scale = p.scale[output < kStreams ? 0 : output < 2 * kStreams ? 1 : 2], base = p.base[output];
  await_inputs();
  if (live) {
    const int o = threadIdx.x % kAll, part = threadIdx.x / kAll;
    float values[kTurns];
    // All loads at once, past the end another's: with a condition each would be waited for.
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
      values[i] = p.partial[(row * kSplits + min(part + i * kParts, kSplits - 1)) * kAll + o];
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) sum += part + i * kParts < kSplits ? double(values[i]) : 0.0;
    if (part < kParts) sums[part][o] = sum;
    __syncthreads();
    double total = 0.0;
#pragma unroll
    for (int other = 0; other < kParts && threadIdx.x < kAll; ++other) total += sums[other][o];
    __syncthreads();
    if (threadIdx.x < kAll) sums[0][o] = total;
  }
  __syncthreads();
  if (threadIdx.x >= 64) return;
  if (live && threadIdx.x < kOutputs) {
    const float inverse = float(rsqrt(sums[0][kOutputs] * (1.0 / kWidth) + double(DSUF_NORM_EPS)));
    affine[lane] = __fadd_rn(__fmul_rn(__fmul_rn(float(sums[0][lane]), inverse), scale), base);
  }
  asm volatile("bar.sync 1, 64;" ::: "memory");
  if (threadIdx.x >= 32) return;
  if (lane < kStreams) {
    p.pre[row * kStreams + lane] = live ? __fadd_rn(sigmoid(affine[lane]), DSUF_HC_EPS) : 0.0f;
    p.post[row * kStreams + lane] = live ? __fmul_rn(sigmoid(affine[kStreams + lane]), 2.0f) : 0.0f;
  }
  Square c;
  float own = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i) c[i / kStreams][i % kStreams] = live ? affine[2 * kStreams + i] : 0.0f;
  sinkhorn(c);
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i) own = lane == i ? c[i / kStreams][i % kStreams] : own;
  if (lane < kStreams * kStreams) p.comb[row * kStreams * kStreams + lane] = live ? own : 0.0f;
}

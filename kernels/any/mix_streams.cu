// A site's mixes from its products: gates, and a doubly stochastic matrix by Sinkhorn rounds.
//
//   a = (sum of partial) * rsqrt(mean(h^2) + eps) * scale + base
//   pre = sigmoid(a[:s]) + hc_eps;  post = 2 sigmoid(a[s:2s]);  comb = sinkhorn(a[2s:])
//   sinkhorn: softmax over each row, + hc_eps; then columns, and (rows, columns) rounds - 1 times; every division is
//   by a sum plus hc_eps; ends on columns
//
// Shapes: MixStreams; streams <= 5. A block of 256 a row adds up the splits, then a warp goes on: lane i * s + j holds
// comb[i, j]. Padding: zeros. Bound: latency; the partial sums are 8 KB a row at the released sizes.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kStreams = DSUF_STREAMS, kOutputs = (2 + kStreams) * kStreams, kWidth = kStreams * DSUF_DIM;
constexpr int kSplits = (kWidth + 255) / 256, kAll = kOutputs + 1;
static_assert(kOutputs < 32 * 2 && kStreams * kStreams <= 32, "a warp holds a row");

// Sums lanes base, base + step, ... in this order, then adds hc_eps if asked to.
__device__ __forceinline__ float line_sum(float c, int base, int step, float last) {
  float sum = __shfl_sync(0xFFFFFFFFu, c, base);
#pragma unroll
  for (int i = 1; i < kStreams; ++i) sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFFu, c, base + i * step));
  return last > 0.0f ? __fadd_rn(sum, last) : sum;
}

__device__ float sinkhorn(float a, int lane) {
  const float eps = DSUF_HC_EPS;
  const int row = lane / kStreams * kStreams, column = lane % kStreams;
  const int row_base = row < kStreams * kStreams ? row : 0;
  float largest = a;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) largest = fmaxf(largest, __shfl_sync(0xFFFFFFFFu, a, row_base + i));
  float c = expf(__fadd_rn(a, -largest));
  c = __fadd_rn(__fdiv_rn(c, line_sum(c, row_base, 1, 0.0f)), eps);
  c = __fdiv_rn(c, line_sum(c, column, kStreams, eps));
  for (int round = 1; round < DSUF_SINKHORN_ROUNDS; ++round) {
    c = __fdiv_rn(c, line_sum(c, row_base, 1, eps));
    c = __fdiv_rn(c, line_sum(c, column, kStreams, eps));
  }
  return c;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) mix_streams(const dsuf::MixStreams p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kParts = 256 / kAll < kSplits ? 256 / kAll : kSplits;
  __shared__ double sums[kParts][kAll];
  __shared__ float affine[kOutputs];
  const int lane = threadIdx.x;
  const int64_t row = blockIdx.x;
  const bool live = row < *p.live;
  if (live) {
    const int o = threadIdx.x % kAll, part = threadIdx.x / kAll;
    double sum = 0.0;
#pragma unroll 8
    for (int s = part; s < kSplits && part < kParts; s += kParts) sum += p.partial[(row * kSplits + s) * kAll + o];
    if (part < kParts) sums[part][o] = sum;
    __syncthreads();
    for (int other = 1; other < kParts && threadIdx.x < kAll; ++other) sums[0][o] += sums[other][o];
  }
  __syncthreads();
  if (threadIdx.x >= 64) return;
  if (live && threadIdx.x < kOutputs) {
    const float inverse = float(1.0 / sqrt(sums[0][kOutputs] / kWidth + double(DSUF_NORM_EPS)));
    const float scale = p.scale[lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2];
    affine[lane] = __fadd_rn(__fmul_rn(__fmul_rn(float(sums[0][lane]), inverse), scale), p.base[lane]);
  }
  asm volatile("bar.sync 1, 64;" ::: "memory");
  if (threadIdx.x >= 32) return;
  if (lane < kStreams) {
    p.pre[row * kStreams + lane] = live ? __fadd_rn(sigmoid(affine[lane]), DSUF_HC_EPS) : 0.0f;
    p.post[row * kStreams + lane] = live ? __fmul_rn(sigmoid(affine[kStreams + lane]), 2.0f) : 0.0f;
  }
  const bool inside = lane < kStreams * kStreams;
  const float c = sinkhorn(inside && live ? affine[2 * kStreams + lane] : 0.0f, lane);
  if (inside) p.comb[row * kStreams * kStreams + lane] = live ? c : 0.0f;
}

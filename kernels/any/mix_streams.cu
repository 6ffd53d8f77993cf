// A site's mixes from its products: gates, and a doubly stochastic matrix by Sinkhorn rounds.
//
//   a = (sum of partial) * rsqrt(mean(h^2) + eps) * scale + base
//   pre = sigmoid(a[:s]) + hc_eps;  post = 2 sigmoid(a[s:2s]);  comb = sinkhorn(a[2s:])
//   sinkhorn: softmax over each row, + hc_eps; then columns, and (rows, columns) rounds - 1 times; every division is
//   by a sum plus hc_eps; ends on columns
//
// Shapes: MixStreams; streams <= 5. A warp a row, lane i * s + j holds comb[i, j]; four rows a block of 128. Padding:
// zeros. Bound: latency; the partial sums are 8 KB a row at the released sizes.
#include "contract.h"
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

extern "C" __global__ void __launch_bounds__(128) mix_streams(const dsuf::MixStreams p) {
  using namespace dsuf;
  __shared__ float affine[4][kOutputs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * 4 + warp;
  if (row >= p.rows) return;
  const bool live = row < *p.live;
  if (live) {
    const float* partial = p.partial + row * kSplits * kAll;
    double squares = 0.0;
    for (int s = 0; s < kSplits; ++s) squares += partial[s * kAll + kOutputs];
    const float inverse = float(1.0 / sqrt(squares / kWidth + double(DSUF_NORM_EPS)));
    for (int o = lane; o < kOutputs; o += 32) {
      double sum = 0.0;
      for (int s = 0; s < kSplits; ++s) sum += partial[s * kAll + o];
      const float scale = p.scale[o < kStreams ? 0 : o < 2 * kStreams ? 1 : 2];
      affine[warp][o] = __fadd_rn(__fmul_rn(__fmul_rn(float(sum), inverse), scale), p.base[o]);
    }
  }
  __syncwarp();
  if (lane < kStreams) {
    p.pre[row * kStreams + lane] = live ? __fadd_rn(sigmoid(affine[warp][lane]), DSUF_HC_EPS) : 0.0f;
    p.post[row * kStreams + lane] = live ? __fmul_rn(sigmoid(affine[warp][kStreams + lane]), 2.0f) : 0.0f;
  }
  const bool inside = lane < kStreams * kStreams;
  const float c = sinkhorn(inside && live ? affine[warp][2 * kStreams + lane] : 0.0f, lane);
  if (inside) p.comb[row * kStreams * kStreams + lane] = live ? c : 0.0f;
}

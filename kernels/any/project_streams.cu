// The products behind a site's mixes, split over the contraction: sums of fn * streams and of streams^2.
//
//   partial[r, s, o] = sum over split s of fn[o, k] * h[r, k];   partial[r, s, outputs] = sum over split s of h[r, k]^2
//
// Shapes: ProjectStreams, 16-byte aligned rows; outputs = (2 + streams) * streams. A split is 256 of the streams * dim
// values. Grid: (splits, ceil(rows / 8)), 256 threads; a warp takes every eighth output for eight rows. Float32 within
// a lane and a warp; mix_streams adds the splits in float64. Padding: not read, not written.
// Bound: fn's bytes, 4 * outputs * streams * dim (1.97 MB at the released sizes), read once for every eight rows.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {
constexpr int kWidth = DSUF_STREAMS * DSUF_DIM, kOutputs = (2 + DSUF_STREAMS) * DSUF_STREAMS, kSplit = 256;
constexpr int kSplits = (kWidth + kSplit - 1) / kSplit, kEach = (kOutputs + 8) / 8;  // the squares are one output more
static_assert(kWidth % 8 == 0, "rows are loaded by eight");
}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) project_streams(const dsuf::ProjectStreams p) {
  using namespace dsuf;
  if (threadIdx.x < kOutputs)
    fetch_ahead(p.fn + int64_t(threadIdx.x) * kWidth + blockIdx.x * kSplit,
                4 * min(kSplit, kWidth - int(blockIdx.x) * kSplit));
  const int warp = threadIdx.x / 32, k = blockIdx.x * kSplit + threadIdx.x % 32 * 8;
  const int first = blockIdx.y * 8, live = min(early_live(p.live), p.rows);
  float weight[kEach][8] = {};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int output = warp + 8 * e;
    if (output >= kOutputs || k >= kWidth) continue;
    const float4* from = reinterpret_cast<const float4*>(p.fn + int64_t(output) * kWidth + k);
    *reinterpret_cast<float4*>(&weight[e][0]) = from[0];
    *reinterpret_cast<float4*>(&weight[e][4]) = from[1];
  }
  await_inputs();
  float h[8][8] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r)
    if (first + r < live && k < kWidth)
      unpack_bf16x8(*reinterpret_cast<const uint4*>(p.streams + int64_t(first + r) * kWidth + k), h[r]);
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int output = warp + 8 * e;
    if (output > kOutputs) continue;
    float sums[8] = {};
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r] = __fmaf_rn(output < kOutputs ? weight[e][i] : h[r][i], h[r][i], sums[r]);
    const float sum = warp_sum_eight(sums);
    const int row = first + threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0 && row < live)
      p.partial[(int64_t(row) * kSplits + blockIdx.x) * (kOutputs + 1) + output] = sum;
  }
}

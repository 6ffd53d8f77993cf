// The products behind a site's mixes, split over the contraction: sums of fn * streams and of streams^2.
//
//   partial[r, s, o] = sum over split s of fn[o, k] * h[r, k];   partial[r, s, outputs] = sum over split s of h[r, k]^2
//
// Shapes: ProjectStreams, 16-byte aligned rows; outputs = (2 + streams) * streams. A split is 256 of the streams * dim
// values. Grid: (splits, ceil(rows / 8)), 256 threads; a warp takes every eighth output for eight rows. Float32 within
// a lane and a warp; mix_streams adds the splits in float64. Padding: not read, not written.
// Bound: fn's bytes, 4 * outputs * streams * dim (1.97 MB at the released sizes), read once for every eight rows.
#include "contract.h"
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {
constexpr int kWidth = DSUF_STREAMS * DSUF_DIM, kOutputs = (2 + DSUF_STREAMS) * DSUF_STREAMS, kSplit = 256;
constexpr int kSplits = (kWidth + kSplit - 1) / kSplit, kEach = (kOutputs + 8) / 8;  // the squares are one output more
static_assert(kWidth % 8 == 0, "rows are loaded by eight");
}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) project_streams(const dsuf::ProjectStreams p) {
  using namespace dsuf;
  const int warp = threadIdx.x / 32, k = blockIdx.x * kSplit + threadIdx.x % 32 * 8;
  const int first = blockIdx.y * 8, live = min(*p.live, p.rows);
  float weight[kEach][8] = {};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int output = warp + 8 * e;
    if (output >= kOutputs || k >= kWidth) continue;
    const float4* from = reinterpret_cast<const float4*>(p.fn + int64_t(output) * kWidth + k);
    *reinterpret_cast<float4*>(&weight[e][0]) = from[0];
    *reinterpret_cast<float4*>(&weight[e][4]) = from[1];
  }
  for (int row = first; row < min(first + 8, live); ++row) {
    float h[8] = {};
    if (k < kWidth) unpack_bf16x8(*reinterpret_cast<const uint4*>(p.streams + int64_t(row) * kWidth + k), h);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int output = warp + 8 * e;
      if (output > kOutputs) continue;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(output < kOutputs ? weight[e][i] : h[i], h[i], sum);
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) p.partial[(int64_t(row) * kSplits + blockIdx.x) * (kOutputs + 1) + output] = sum;
    }
  }
}

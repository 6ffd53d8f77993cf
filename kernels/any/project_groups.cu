// The first output projection: a matrix for each group of heads, FP8 weights, BF16 inputs that are not quantised.
//
//   out[r, g, n] = bf16(sum over blocks b of ws[g, n / 32, b] * (sum over b of w[g, n, k] * x[r, g, k]))
//
// Shapes: ProjectGroups; k = heads * head_dim / groups (all heads of the launch). Rows 16-byte aligned, rank a multiple
// of 16 and a scale block never spans groups (rank a multiple of 32). Sums as in project_fp8. Grid:
// (groups * rank / 16, ceil(rows / 8)), 8 warps. Padding: zeros.
// Bound: the weights' bytes, heads * head_dim * rank.
#include "contract.h"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) project_groups(const dsuf::ProjectGroups p) {
  using namespace dsuf;
  constexpr int kWidth = DSUF_HEADS * DSUF_HEAD_DIM / DSUF_O_GROUPS, kBlocks = kWidth / 32;
  if (threadIdx.x < 16) fetch_ahead(p.weight + int64_t(blockIdx.x * 16 + threadIdx.x) * kWidth, kWidth);
  await_inputs();
  static_assert(kWidth % 32 == 0 && DSUF_O_LORA % 32 == 0, "scale blocks are whole");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16, row0 = blockIdx.y * 8;
  const int live = min(*p.live, p.rows), row = row0 + lane / 4, part = lane % 4 * 8;
  const uint8_t* low = p.weight + int64_t(first + lane / 4) * kWidth + part;
  const uint8_t* high = low + int64_t(8) * kWidth;
  const uint16_t* x = p.x + (int64_t(row) * DSUF_O_GROUPS + first / DSUF_O_LORA) * kWidth + part;
  const uint8_t* weight_scale = p.weight_scale + int64_t(first / 32) * kBlocks;
  float total[4] = {};
  constexpr int kAtOnce = 4;
  for (int from = warp; from < kBlocks; from += 8 * kAtOnce) {
    uint2 a[kAtOnce], b[kAtOnce];
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int g = min(from + 8 * i, kBlocks - 1);
      a[i] = *reinterpret_cast<const uint2*>(low + g * 32);
      b[i] = *reinterpret_cast<const uint2*>(high + g * 32);
      v[i] = row < live ? *reinterpret_cast<const uint4*>(x + g * 32) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int g = from + 8 * i;
      if (g >= kBlocks) break;
      const float scale = decode_e8m0(weight_scale[g]);
      float c[4] = {};
      mma_bf16(c, bf16x2_e4m3(a[i].x, 0), bf16x2_e4m3(b[i].x, 0), bf16x2_e4m3(a[i].x, 1), bf16x2_e4m3(b[i].x, 1),
               v[i].x, v[i].y);
      mma_bf16(c, bf16x2_e4m3(a[i].y, 0), bf16x2_e4m3(b[i].y, 0), bf16x2_e4m3(a[i].y, 1), bf16x2_e4m3(b[i].y, 1),
               v[i].z, v[i].w);
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] = __fmaf_rn(c[j], scale, total[j]);
    }
  }
  const float sum = sum_tiles<8>(total);
  const int output = first + threadIdx.x / 8, to = row0 + threadIdx.x % 8;
  if (threadIdx.x < 128 && to < p.rows)
    p.out[int64_t(to) * (DSUF_O_GROUPS * DSUF_O_LORA) + output] = to < live ? bf16_bits(sum) : 0;
}

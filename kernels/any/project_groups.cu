// The first output projection: a matrix for each group of heads, FP8 weights, BF16 inputs that are not quantised.
//
//   out[r, g, n] = bf16(sum over blocks b of ws[g, n / 32, b] * (sum over b of w[g, n, k] * x[r, g, k]))
//
// Shapes: ProjectGroups; k = heads * head_dim / groups (all heads of the launch). Rows 16-byte aligned, rank a multiple
// of 16 and a scale block never spans groups (rank a multiple of 32). Sums as in project_fp8. Grid:
// (groups * rank / 16, ceil(rows / 8)), 8 warps. Padding: zeros.
// Bound: the weights' bytes, heads * head_dim * rank.
#include "contract.h"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// Two E4M3 codes as a pair of BF16 values: exact.
__device__ __forceinline__ uint32_t bf16x2_e4m3(uint16_t codes) {
  const uint32_t halves = decode_e4m3x2(codes);
  const float low = __half2float(__ushort_as_half(uint16_t(halves)));
  const float high = __half2float(__ushort_as_half(uint16_t(halves >> 16)));
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) project_groups(const dsuf::ProjectGroups p) {
  using namespace dsuf;
  constexpr int kWidth = DSUF_HEADS * DSUF_HEAD_DIM / DSUF_O_GROUPS, kBlocks = kWidth / 32;
  static_assert(kWidth % 32 == 0 && DSUF_O_LORA % 32 == 0, "scale blocks are whole");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16, row0 = blockIdx.y * 8;
  const int live = min(*p.live, p.rows), row = row0 + lane / 4, part = lane % 4 * 8;
  const uint8_t* low = p.weight + int64_t(first + lane / 4) * kWidth + part;
  const uint8_t* high = low + int64_t(8) * kWidth;
  const uint16_t* x = p.x + (int64_t(row) * DSUF_O_GROUPS + first / DSUF_O_LORA) * kWidth + part;
  const uint8_t* weight_scale = p.weight_scale + int64_t(first / 32) * kBlocks;
  float total[4] = {};
#pragma unroll 4
  for (int g = warp; g < kBlocks; g += 8) {
    const uint2 a = *reinterpret_cast<const uint2*>(low + g * 32), b = *reinterpret_cast<const uint2*>(high + g * 32);
    const uint4 v = row < live ? *reinterpret_cast<const uint4*>(x + g * 32) : make_uint4(0, 0, 0, 0);
    const float scale = decode_e8m0(weight_scale[g]);
    float c[4] = {};
    mma_bf16(c, bf16x2_e4m3(a.x), bf16x2_e4m3(b.x), bf16x2_e4m3(a.x >> 16), bf16x2_e4m3(b.x >> 16), v.x, v.y);
    mma_bf16(c, bf16x2_e4m3(a.y), bf16x2_e4m3(b.y), bf16x2_e4m3(a.y >> 16), bf16x2_e4m3(b.y >> 16), v.z, v.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = __fmaf_rn(c[i], scale, total[i]);
  }
  const float sum = sum_tiles<8>(total);
  const int output = first + threadIdx.x / 8, to = row0 + threadIdx.x % 8;
  if (threadIdx.x < 128 && to < p.rows)
    p.out[int64_t(to) * (DSUF_O_GROUPS * DSUF_O_LORA) + output] = to < live ? bf16_bits(sum) : 0;
}

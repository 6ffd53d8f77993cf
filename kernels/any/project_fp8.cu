// A quantised linear layer for few rows: FP8 weights and inputs, one scale a 32 x 32 block and a row's 32 values.
//
//   out[r, n] = bf16(sum over groups g of ws[n / 32, g] * xs[r, g] * (sum over g of w[n, k] * x[r, k]))
//
// Shapes: ProjectFp8; an entry a contraction width: project_fp8_dim, _q_lora, _o, _inter, _engram. Rows of codes and
// weights 8-byte aligned. A group's sum of exact products is a float32 tensor-core sum, groups are added in a fixed order
// per warp, then warp by warp: a row's result depends on nothing but its input. Grid: (ceil(n / 16), ceil(rows / 8)),
// 8 warps, of which each takes every eighth group. Padding: zeros.
// Bound: the weights' bytes, n * k, read once for every eight rows.
#include "contract.h"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kWarps = 8;

template <int kWidth>
__device__ void project(const ProjectFp8& p) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kGroups = kWidth / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16, row0 = blockIdx.y * 8;
  const int live = min(*p.live, p.rows), row = row0 + lane / 4, part = lane % 4 * 8;
  const uint8_t* low = p.weight + int64_t(min(first + lane / 4, p.n - 1)) * kWidth + part;
  const uint8_t* high = p.weight + int64_t(min(first + lane / 4 + 8, p.n - 1)) * kWidth + part;
  const uint8_t* x = p.codes + int64_t(row) * kWidth + part;
  const uint8_t* weight_scale = p.weight_scale + int64_t(first / 32) * kGroups;
  const int even = row0 + lane % 4 * 2;
  float total[4] = {};
#pragma unroll 4
  for (int g = warp; g < kGroups; g += kWarps) {
    const uint2 a = *reinterpret_cast<const uint2*>(low + g * 32), b = *reinterpret_cast<const uint2*>(high + g * 32);
    const uint2 v = row < live ? *reinterpret_cast<const uint2*>(x + g * 32) : make_uint2(0, 0);
    const float scale = decode_e8m0(weight_scale[g]);
    const float x0 = even < live ? decode_e8m0(p.scales[int64_t(even) * kGroups + g]) : 0.0f;
    const float x1 = even + 1 < live ? decode_e8m0(p.scales[int64_t(even + 1) * kGroups + g]) : 0.0f;
    float c[4] = {};
    mma_f16(c, decode_e4m3x2(a.x), decode_e4m3x2(b.x), decode_e4m3x2(a.x >> 16), decode_e4m3x2(b.x >> 16),
            decode_e4m3x2(v.x), decode_e4m3x2(v.x >> 16));
    mma_f16(c, decode_e4m3x2(a.y), decode_e4m3x2(b.y), decode_e4m3x2(a.y >> 16), decode_e4m3x2(b.y >> 16),
            decode_e4m3x2(v.y), decode_e4m3x2(v.y >> 16));
    total[0] = __fmaf_rn(c[0], scale * x0, total[0]);
    total[1] = __fmaf_rn(c[1], scale * x1, total[1]);
    total[2] = __fmaf_rn(c[2], scale * x0, total[2]);
    total[3] = __fmaf_rn(c[3], scale * x1, total[3]);
  }
  const float sum = sum_tiles<kWarps>(total);
  const int output = first + threadIdx.x / 8, to = row0 + threadIdx.x % 8;
  if (threadIdx.x < 128 && output < p.n && to < p.rows)
    p.out[int64_t(to) * p.n + output] = to < live ? bf16_bits(sum) : 0;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) project_fp8_dim(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_DIM>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_q_lora(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_Q_LORA>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_o(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_O_GROUPS * DSUF_O_LORA>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_inter(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_INTER>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_engram(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_ENGRAM_WIDTH>(p);
}

// A quantised linear layer for few rows: FP8 weights and inputs, one scale a 32 x 32 block and a row's 32 values.
//
//   out[r, n] = bf16(sum over groups g of ws[n / 32, g] * xs[r, g] * (sum over g of w[n, k] * x[r, k]))
//
// Shapes: ProjectFp8; an entry a contraction width: project_fp8_dim, _q_lora, _o, _inter, _engram, _taps. Rows of codes and
// weights 8-byte aligned. A group's sum of exact products is a float32 tensor-core sum, groups are added in a fixed
// order per warp, then warp by warp: a row's result depends on nothing but its input. Grid: (ceil(n / 16), ceil(rows /
// 8)), 8 warps, of which each takes every eighth run of four groups (scales 4-byte aligned, if groups come in fours).
// Padding: zeros. Bound: the weights' bytes, n * k, read once for every eight rows.
#include "contract.h"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kWarps = 8;

template <int kWidth>
__device__ void project(const ProjectFp8& p) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kGroups = kWidth / 32, kRun = kGroups % 4 ? 1 : 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16, row0 = blockIdx.y * 8;
  const int live = min(*p.live, p.rows), row = row0 + lane / 4, part = lane % 4 * 8;
  const uint8_t* low = p.weight + int64_t(min(first + lane / 4, p.n - 1)) * kWidth + part;
  const uint8_t* high = p.weight + int64_t(min(first + lane / 4 + 8, p.n - 1)) * kWidth + part;
  const uint8_t* x = p.codes + int64_t(row) * kWidth + part;
  const uint8_t* weight_scale = p.weight_scale + int64_t(first / 32) * kGroups;
  const int even = row0 + lane % 4 * 2;
  float total[4] = {};
#pragma unroll 2
  for (int at = warp * kRun; at < kGroups; at += kWarps * kRun) {
    uint2 a[kRun], b[kRun], v[kRun];
#pragma unroll
    for (int g = 0; g < kRun; ++g) {
      a[g] = *reinterpret_cast<const uint2*>(low + (at + g) * 32);
      b[g] = *reinterpret_cast<const uint2*>(high + (at + g) * 32);
      v[g] = row < live ? *reinterpret_cast<const uint2*>(x + (at + g) * 32) : make_uint2(0, 0);
    }
    const uint32_t scales = load_scales<kRun>(weight_scale + at);
    const uint32_t x0 = even < live ? load_scales<kRun>(p.scales + int64_t(even) * kGroups + at) : 0;
    const uint32_t x1 = even + 1 < live ? load_scales<kRun>(p.scales + int64_t(even + 1) * kGroups + at) : 0;
#pragma unroll
    for (int g = 0; g < kRun; ++g) {
      float c[4] = {};
      mma_f16(c, decode_e4m3x2(a[g].x), decode_e4m3x2(b[g].x), decode_e4m3x2(a[g].x >> 16),
              decode_e4m3x2(b[g].x >> 16), decode_e4m3x2(v[g].x), decode_e4m3x2(v[g].x >> 16));
      mma_f16(c, decode_e4m3x2(a[g].y), decode_e4m3x2(b[g].y), decode_e4m3x2(a[g].y >> 16),
              decode_e4m3x2(b[g].y >> 16), decode_e4m3x2(v[g].y), decode_e4m3x2(v[g].y >> 16));
      const float s0 = pick_scale(scales, g) * pick_scale(x0, g), s1 = pick_scale(scales, g) * pick_scale(x1, g);
      total[0] = __fmaf_rn(c[0], s0, total[0]);
      total[1] = __fmaf_rn(c[1], s1, total[1]);
      total[2] = __fmaf_rn(c[2], s0, total[2]);
      total[3] = __fmaf_rn(c[3], s1, total[3]);
    }
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
extern "C" __global__ void __launch_bounds__(256) project_fp8_taps(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_TAPS * DSUF_DIM>(p);
}

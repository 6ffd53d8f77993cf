// A quantised linear layer for few rows: FP8 weights and inputs, one scale a 32 x 32 block and a row's 32 values.
//
//   out[r, n] = bf16(sum over groups g of ws[n / 32, g] * xs[r, g] * (sum over g of w[n, k] * x[r, k]))
//
// Shapes: ProjectFp8; an entry a contraction width: project_fp8_dim, _q_lora, _o, _inter, _engram, _taps. Rows of codes
// and weights 16-byte aligned. A lane reads sixteen neighbours of a row, so that four lanes have two groups: each group
// is a product in which the other's lanes hold zeros, and that float32 tensor-core sum of exact products is scaled and
// added in a fixed order per warp, then warp by warp. A row's result depends on nothing but its input. Grid: (ceil(n /
// 16), ceil(rows / 8)); the warps of a block (4, 8 or 16, by the width) take pairs of groups in turn.
// Padding: zeros. Bound: the weights' bytes, n * k, read once for every eight rows.
#include "contract.h"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// What a lane reads of two groups: sixteen values of two outputs and of one row, and the scales.
template <int kGroups>
struct GroupPair {
  uint4 low, high, x;
  uint32_t weight_scales, even_scales, odd_scales;

  // Two scales, or one where the number of groups is odd and it is the last.
  __device__ static __forceinline__ uint32_t scales(const uint8_t* at, int group) {
    if constexpr (kGroups % 2 == 0) return *reinterpret_cast<const uint16_t*>(at + group);
    return at[group] | (group + 1 < kGroups ? uint32_t(at[group + 1]) << 8 : 0);
  }

  __device__ __forceinline__ void load(const uint8_t* w_low, const uint8_t* w_high, const uint8_t* v, const uint8_t* ws,
                                       const uint8_t* even, const uint8_t* odd, int pair) {
    const uint4 none = make_uint4(0, 0, 0, 0);
    // The second half of the last pair, where there is none.
    const bool inside = kGroups % 2 == 0 || pair * 2 + int(threadIdx.x % 4 / 2) < kGroups;
    low = inside ? *reinterpret_cast<const uint4*>(w_low + pair * 64) : none;
    high = inside ? *reinterpret_cast<const uint4*>(w_high + pair * 64) : none;
    x = inside && v ? *reinterpret_cast<const uint4*>(v + pair * 64) : none;
    weight_scales = scales(ws, pair * 2);
    even_scales = even ? scales(even, pair * 2) : 0;
    odd_scales = odd ? scales(odd, pair * 2) : 0;
  }

  __device__ __forceinline__ void add_to(float (&total)[4]) const {
    const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
    const uint32_t v[4] = {x.x, x.y, x.z, x.w};
    const bool second = threadIdx.x % 4 >= 2;
    float c[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t a0 = decode_e4m3x2(a[j]), a1 = decode_e4m3x2(b[j]);
      const uint32_t a2 = decode_e4m3x2(a[j] >> 16), a3 = decode_e4m3x2(b[j] >> 16);
      const uint32_t b0 = decode_e4m3x2(v[j]), b1 = decode_e4m3x2(v[j] >> 16);
      mma_f16(c[0], a0, a1, a2, a3, second ? 0 : b0, second ? 0 : b1);
      mma_f16(c[1], a0, a1, a2, a3, second ? b0 : 0, second ? b1 : 0);
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float s = pick_scale(weight_scales, g);
      const float s0 = s * pick_scale(even_scales, g), s1 = s * pick_scale(odd_scales, g);
      total[0] = __fmaf_rn(c[g][0], s0, total[0]);
      total[1] = __fmaf_rn(c[g][1], s1, total[1]);
      total[2] = __fmaf_rn(c[g][2], s0, total[2]);
      total[3] = __fmaf_rn(c[g][3], s1, total[3]);
    }
  }
};

template <int kWidth, int kWarps>
__device__ void project(const ProjectFp8& p) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  if (threadIdx.x < 16 && blockIdx.x * 16 + threadIdx.x < p.n)
    fetch_ahead(p.weight + int64_t(blockIdx.x * 16 + threadIdx.x) * kWidth, kWidth);
  await_inputs();
  constexpr int kGroups = kWidth / 32, kPairs = (kGroups + 1) / 2, kTurns = (kPairs + kWarps - 1) / kWarps;
  constexpr int kAtOnce = kTurns < 5 ? kTurns : 5;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16, row0 = blockIdx.y * 8;
  const int live = min(*p.live, p.rows), row = row0 + lane / 4, part = lane % 4 * 16, even = row0 + lane % 4 * 2;
  const uint8_t* low = p.weight + int64_t(min(first + lane / 4, p.n - 1)) * kWidth + part;
  const uint8_t* high = p.weight + int64_t(min(first + lane / 4 + 8, p.n - 1)) * kWidth + part;
  const uint8_t* x = row < live ? p.codes + int64_t(row) * kWidth + part : nullptr;
  const uint8_t* weight_scale = p.weight_scale + int64_t(first / 32) * kGroups;
  const uint8_t* even_scale = even < live ? p.scales + int64_t(even) * kGroups : nullptr;
  const uint8_t* odd_scale = even + 1 < live ? p.scales + int64_t(even + 1) * kGroups : nullptr;
  float total[4] = {};
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    GroupPair<kGroups> pair[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = (turn + i) * kWarps + warp;
      if (at < kPairs) pair[i].load(low, high, x, weight_scale, even_scale, odd_scale, at);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if ((turn + i) * kWarps + warp < kPairs) pair[i].add_to(total);
  }
  const float sum = sum_tiles<kWarps>(total);
  const int output = first + threadIdx.x / 8, to = row0 + threadIdx.x % 8;
  if (threadIdx.x < 128 && output < p.n && to < p.rows)
    p.out[int64_t(to) * p.n + output] = to < live ? bf16_bits(sum) : 0;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(512) project_fp8_dim(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_DIM, 16>(p);
}
extern "C" __global__ void __launch_bounds__(128) project_fp8_q_lora(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_Q_LORA, 4>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_o(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_O_GROUPS * DSUF_O_LORA, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_inter(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_INTER, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_engram(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_ENGRAM_WIDTH, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_taps(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_TAPS * DSUF_DIM, 8>(p);
}

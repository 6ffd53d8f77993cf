// A product of FP4 weights with the FP8 rows of the pairs that one expert serves.
#pragma once
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// One warp's share of a 16 x 8 tile: outputs from `low` and eight rows on, pairs by pair[0..1] of this lane's own. A
// lane reads eight weights of two outputs and eight values of one row a group; runs of four groups go to the warps in
// turn (of one, where groups do not come in fours).
template <int kWidth, int kWarps>
__device__ __forceinline__ void multiply_fp4(float (&total)[4], const uint8_t* low, const uint8_t* low_scale,
                                             const uint8_t* x, const uint8_t* x_scale_even,
                                             const uint8_t* x_scale_odd) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kGroups = kWidth / 32, kRun = kGroups % 4 ? 1 : 4;
  const uint8_t* high = low + 8 * (kWidth / 2);
  const uint8_t* high_scale = low_scale + 8 * kGroups;
#pragma unroll 2
  for (int at = threadIdx.x / 32 * kRun; at < kGroups; at += kWarps * kRun) {
    uint32_t a[kRun], b[kRun];
    uint2 v[kRun];
#pragma unroll
    for (int g = 0; g < kRun; ++g) {
      a[g] = *reinterpret_cast<const uint32_t*>(low + (at + g) * 16);
      b[g] = *reinterpret_cast<const uint32_t*>(high + (at + g) * 16);
      v[g] = x ? *reinterpret_cast<const uint2*>(x + (at + g) * 32) : make_uint2(0, 0);
    }
    const uint32_t w0 = load_scales<kRun>(low_scale + at), w1 = load_scales<kRun>(high_scale + at);
    const uint32_t x0 = x_scale_even ? load_scales<kRun>(x_scale_even + at) : 0;
    const uint32_t x1 = x_scale_odd ? load_scales<kRun>(x_scale_odd + at) : 0;
#pragma unroll
    for (int g = 0; g < kRun; ++g) {
      // Weights come in pairs (j, j + 4), so the row's values are paired alike.
      const uint32_t v01 = __byte_perm(v[g].x, v[g].y, 0x5140), v23 = __byte_perm(v[g].x, v[g].y, 0x7362);
      float c[4] = {};
      mma_f16(c, halves_e2m1(a[g], 0), halves_e2m1(b[g], 0), halves_e2m1(a[g], 1), halves_e2m1(b[g], 1),
              decode_e4m3x2(v01), decode_e4m3x2(v01 >> 16));
      mma_f16(c, halves_e2m1(a[g], 2), halves_e2m1(b[g], 2), halves_e2m1(a[g], 3), halves_e2m1(b[g], 3),
              decode_e4m3x2(v23), decode_e4m3x2(v23 >> 16));
      const float s0 = pick_scale(w0, g) * kHalvesE2m1Scale, s1 = pick_scale(w1, g) * kHalvesE2m1Scale;
      total[0] = __fmaf_rn(c[0], s0 * pick_scale(x0, g), total[0]);
      total[1] = __fmaf_rn(c[1], s0 * pick_scale(x1, g), total[1]);
      total[2] = __fmaf_rn(c[2], s1 * pick_scale(x0, g), total[2]);
      total[3] = __fmaf_rn(c[3], s1 * pick_scale(x1, g), total[3]);
    }
  }
}

__device__ __forceinline__ float swiglu(float a, float b) {
  a = fminf(a, DSUF_SWIGLU_LIMIT);
  b = fminf(fmaxf(b, -DSUF_SWIGLU_LIMIT), DSUF_SWIGLU_LIMIT);
  return __fmul_rn(__fmul_rn(a, sigmoid(a)), b);
}

}  // namespace dsuf

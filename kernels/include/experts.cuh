// A product of FP4 weights with the FP8 rows of the pairs that one expert serves.
#pragma once
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// One warp's share of a 16 x 8 tile: outputs from `low` and eight rows on, pairs by pair[0..1] of this lane's own. A lane
// reads eight weights of two outputs and eight values of one row a group; group g of kGroups goes to warp g % kWarps.
template <int kWidth, int kWarps>
__device__ __forceinline__ void multiply_fp4(float (&total)[4], const uint8_t* low, const uint8_t* low_scale,
                                             const uint8_t* x, const uint8_t* x_scale_even, const uint8_t* x_scale_odd) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kGroups = kWidth / 32;
  const uint8_t* high = low + 8 * (kWidth / 2);
  const uint8_t* high_scale = low_scale + 8 * kGroups;
#pragma unroll 4
  for (int g = threadIdx.x / 32; g < kGroups; g += kWarps) {
    const uint32_t a = *reinterpret_cast<const uint32_t*>(low + g * 16);
    const uint32_t b = *reinterpret_cast<const uint32_t*>(high + g * 16);
    const uint2 v = x ? *reinterpret_cast<const uint2*>(x + g * 32) : make_uint2(0, 0);
    const float s0 = decode_e8m0(low_scale[g]) * kHalvesE2m1Scale, s1 = decode_e8m0(high_scale[g]) * kHalvesE2m1Scale;
    const float x0 = x_scale_even ? decode_e8m0(x_scale_even[g]) : 0.0f;
    const float x1 = x_scale_odd ? decode_e8m0(x_scale_odd[g]) : 0.0f;
    // Weights come in pairs (j, j + 4), so the row's values are paired alike.
    const uint32_t v01 = __byte_perm(v.x, v.y, 0x5140), v23 = __byte_perm(v.x, v.y, 0x7362);
    float c[4] = {};
    mma_f16(c, halves_e2m1(a, 0), halves_e2m1(b, 0), halves_e2m1(a, 1), halves_e2m1(b, 1), decode_e4m3x2(v01),
            decode_e4m3x2(v01 >> 16));
    mma_f16(c, halves_e2m1(a, 2), halves_e2m1(b, 2), halves_e2m1(a, 3), halves_e2m1(b, 3), decode_e4m3x2(v23),
            decode_e4m3x2(v23 >> 16));
    total[0] = __fmaf_rn(c[0], s0 * x0, total[0]);
    total[1] = __fmaf_rn(c[1], s0 * x1, total[1]);
    total[2] = __fmaf_rn(c[2], s1 * x0, total[2]);
    total[3] = __fmaf_rn(c[3], s1 * x1, total[3]);
  }
}

__device__ __forceinline__ float swiglu(float a, float b) {
  a = fminf(a, DSUF_SWIGLU_LIMIT);
  b = fminf(fmaxf(b, -DSUF_SWIGLU_LIMIT), DSUF_SWIGLU_LIMIT);
  return __fmul_rn(__fmul_rn(a, sigmoid(a)), b);
}

}  // namespace dsuf

// Rotary positions: pairs of channels turned by the angles that place_angles has listed.
#pragma once
#include "numeric.cuh"

namespace dsuf {

constexpr int kRopeDim = DSUF_ROPE_DIM;

// The complex product of (real, imaginary) with a cosine and a sine, rounded to BF16.
__device__ __forceinline__ void turn_pair(float& real, float& imaginary, float cosine, float sine) {
  const float x = real, y = imaginary;
  real = round_bf16(__fadd_rn(__fmul_rn(x, cosine), -__fmul_rn(y, sine)));
  imaginary = round_bf16(__fadd_rn(__fmul_rn(x, sine), __fmul_rn(y, cosine)));
}

// Turn octet `octet` of a head `width` channels wide, of which the last are turned; `angles` are those of the row.
__device__ __forceinline__ void turn_octet(float (&x)[8], int octet, int width, const float* angles) {
  static_assert(kRopeDim % 8 == 0, "an octet is turned whole or not at all");
  const int first = octet * 8 - (width - kRopeDim);
  if (first < 0) return;
  const float4* own = reinterpret_cast<const float4*>(angles + first);
  const float4 low = own[0], high = own[1];
  turn_pair(x[0], x[1], low.x, low.y);
  turn_pair(x[2], x[3], low.z, low.w);
  turn_pair(x[4], x[5], high.x, high.y);
  turn_pair(x[6], x[7], high.z, high.w);
}

}  // namespace dsuf

// Number formats below BF16, as dsuf/reference/quant.py defines them, exact to the bit.
//
//   E4M3 (fp8)  1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448
//   E2M1 (fp4)  magnitudes 0 .5 1 1.5 2 3 4 6 are codes 0..7, bit 3 is the sign; two codes a byte, even element low
//   E8M0        byte b means 2^(b-127)
//
// BF16 travels as uint16_t; arithmetic is float32 with explicit roundings, so that no contraction can change a result.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace dsuf {

__device__ __forceinline__ float bf16_value(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

// To nearest, ties to even.
__device__ __forceinline__ uint16_t bf16_bits(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float round_bf16(float x) { return bf16_value(bf16_bits(x)); }

// Eight BF16 values of one 16-byte load.
__device__ __forceinline__ void unpack_bf16x8(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 pack_bf16x8(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = uint32_t(bf16_bits(x[2 * i])) | uint32_t(bf16_bits(x[2 * i + 1])) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The smallest power of two at or above a positive normal x: any mantissa carries over.
__device__ __forceinline__ float ceil_power_of_two(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x007FFFFFu) & 0x7F800000u);
}

// x / power for a power of two of which the reciprocal is a normal number too: the same bits without a division.
__device__ __forceinline__ float over_power_of_two(float x, float power) {
  return __fmul_rn(x, __uint_as_float(0x7F000000u - __float_as_uint(power)));
}

__device__ __forceinline__ uint8_t encode_e8m0(float power) { return uint8_t(__float_as_uint(power) >> 23); }

__device__ __forceinline__ float decode_e8m0(uint8_t code) {
  return __uint_as_float(code ? uint32_t(code) << 23 : 0x00400000u);
}

// Four neighbouring scales in one load, or a single one; the address is aligned to their number.
template <int kCount>
__device__ __forceinline__ uint32_t load_scales(const uint8_t* at) {
  static_assert(kCount == 1 || kCount == 4, "a byte or a word");
  if constexpr (kCount == 4) return *reinterpret_cast<const uint32_t*>(at);
  return *at;
}

// Scale i of those.
__device__ __forceinline__ float pick_scale(uint32_t scales, int i) { return decode_e8m0(uint8_t(scales >> (8 * i))); }

// Nearest E4M3 of |x| <= 448 up to rounding; the sign of zero is kept.
__device__ __forceinline__ uint8_t encode_e4m3(float x) {
  return uint8_t(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

// Two codes, the lower byte's value first.
__device__ __forceinline__ uint32_t decode_e4m3x2(uint16_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return uint32_t(pair.x) | uint32_t(pair.y) << 16;
}

__device__ __forceinline__ float decode_e4m3(uint8_t code) {
  return __half2float(__ushort_as_half(uint16_t(decode_e4m3x2(code))));
}

// Nearest E2M1 of |x| <= 6: midpoints go to the even code, so every second comparison is strict.
__device__ __forceinline__ uint8_t encode_e2m1(float x) {
  const float a = fabsf(x);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return uint8_t(code | (__float_as_uint(x) >> 31) << 3);
}

__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  // The three magnitude bits are the top of a half's exponent and mantissa, 2^14 too small.
  const uint32_t bits = (code & 8u) << 12 | (code & 7u) << 9;
  return __half2float(__ushort_as_half(uint16_t(bits))) * 16384.0f;
}

// A pair of BF16 values times a power of two or another BF16 value: exact wherever the product is a BF16 value.
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t pair, uint32_t factors) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
  return product;
}

__device__ __forceinline__ uint32_t twice_bf16(float x) { return uint32_t(bf16_bits(x)) * 0x10001u; }

// Codes 2j and 2j + 1 of four E4M3 codes as BF16 values: their bits in place are 2^-120 of them, below normal or not.
__device__ __forceinline__ uint32_t bf16x2_e4m3(uint32_t codes, int j) {
  const uint32_t high = __byte_perm(codes, 0, j ? 0x3424 : 0x1404);
  return scale_bf16x2((high & 0x80008000u) | (high >> 4 & 0x07F007F0u), 0x7B807B80u);
}

// Codes 2j and 2j + 1 of eight E2M1 codes as BF16 values: their bits in place are 2^-126 of them.
__device__ __forceinline__ uint32_t bf16x2_e2m1(uint32_t codes, int j) {
  const uint32_t apart = (codes >> (8 * j) & 0xFFu) * 0x1001u;
  return scale_bf16x2((apart & 0x00080008u) << 12 | (apart & 0x00070007u) << 6, 0x7E807E80u);
}

// Codes j and j + 4 of a word of eight E2M1 codes, as a pair of halves that are 2^-14 of the values.
__device__ __forceinline__ uint32_t halves_e2m1(uint32_t codes, int j) {
  const uint32_t pair = codes >> (4 * j);
  return (pair & 0x00080008u) << 12 | (pair & 0x00070007u) << 9;
}
constexpr float kHalvesE2m1Scale = 16384.0f;

// The three quantisers: a scale from a group's largest magnitude, and the code of x / scale.
struct Fp8 {
  static constexpr int kGroup = 32, kCodesPerByte = 1;
  __device__ static float scale(float largest) {
    return ceil_power_of_two(__fmul_rn(fmaxf(largest, 1e-4f), float(1.0 / 448.0)));
  }
  __device__ static uint8_t encode(float x, float scale) { return encode_e4m3(over_power_of_two(x, scale)); }
  __device__ static float decode(uint8_t code) { return decode_e4m3(code); }
  __device__ static uint8_t encode_scale(float scale) { return encode_e8m0(scale); }
};

struct Fp4Index {
  static constexpr int kGroup = 32, kCodesPerByte = 2;
  __device__ static float scale(float largest) {
    return ceil_power_of_two(__fmul_rn(fmaxf(largest, 0x1.8p-124f), float(1.0 / 6.0)));
  }
  __device__ static uint8_t encode(float x, float scale) { return encode_e2m1(over_power_of_two(x, scale)); }
  __device__ static float decode(uint8_t code) { return decode_e2m1(code); }
  __device__ static uint8_t encode_scale(float scale) { return encode_e8m0(scale); }
};

struct Fp4Entry {
  static constexpr int kGroup = 16, kCodesPerByte = 2;
  __device__ static float scale(float largest) {
    return decode_e4m3(encode_e4m3(fminf(__fdiv_rn(fmaxf(largest, 0x1.8p-7f), 6.0f), 448.0f)));
  }
  // A rounded scale can be too small: beyond 6 the code is that of 6, which encode_e2m1 gives by itself.
  __device__ static uint8_t encode(float x, float scale) { return encode_e2m1(__fdiv_rn(x, scale)); }
  __device__ static float decode(uint8_t code) { return decode_e2m1(code); }
  __device__ static uint8_t encode_scale(float scale) { return encode_e4m3(scale); }
};

// Eight codes to memory, by words where the address allows it: a packed row's stride need not be a multiple of four.
template <int kBytes>
__device__ __forceinline__ void store_codes(uint8_t* to, const uint8_t (&codes)[kBytes]) {
  if ((reinterpret_cast<uintptr_t>(to) & 3) == 0) {
#pragma unroll
    for (int i = 0; i < kBytes; i += 4)
      *reinterpret_cast<uint32_t*>(to + i) =
          codes[i] | uint32_t(codes[i + 1]) << 8 | uint32_t(codes[i + 2]) << 16 | uint32_t(codes[i + 3]) << 24;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) to[i] = codes[i];
  }
}

// Quantise an octet of a group that Quantiser::kGroup / 8 neighbouring lanes hold; all lanes of the warp must come
// here. Writes the octet's codes, the first lane of a group its scale; `x` becomes what the codes mean.
template <class Quantiser>
__device__ __forceinline__ void quantize_octet(float (&x)[8], bool writes, uint8_t* codes, uint8_t* scales, int octet) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
  for (int other = 1; other < Quantiser::kGroup / 8; other *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, other));
  const float scale = Quantiser::scale(largest);
  uint8_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    code[i] = Quantiser::encode(x[i], scale);
    x[i] = __fmul_rn(Quantiser::decode(code[i]), scale);
  }
  if (!writes) return;
  if constexpr (Quantiser::kCodesPerByte == 1) {
    store_codes<8>(codes + octet * 8, code);
  } else {
    uint8_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = uint8_t(code[2 * i] | code[2 * i + 1] << 4);
    store_codes<4>(codes + octet * 4, packed);
  }
  if (octet % (Quantiser::kGroup / 8) == 0) scales[octet / (Quantiser::kGroup / 8)] = Quantiser::encode_scale(scale);
}

// An order of floats in which unsigned integers sort as they do; zeros of either sign are one.
__device__ __forceinline__ uint32_t sort_bits(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_sort_bits(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ float sigmoid(float x) {
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-fmaxf(x, -88.0f))));
}

}  // namespace dsuf

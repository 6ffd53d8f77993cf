// The distribution that a token is drawn from: a row's logits tempered, cut to the nucleus, as integer masses.
//
//   mass(l) = round(2^44 * e^((l - peak) / temperature)); in the nucleus: l > least, or l = least and id <= last
//
// Sums of integers do not depend on an order, so that a draw is the same in every launch geometry. What a mass loses is
// less than 2^-44 of the likeliest token's probability; the sum holds for 2^19 tokens. Random numbers are those of
// NumPy's Philox generator.
#pragma once
#include "numeric.cuh"

namespace dsuf {

constexpr float kMassScale = 0x1p44f;
constexpr double kShareScale = 0x1p62;  // of probabilities that are compared or subtracted

struct Nucleus {
  float peak, least, inverse;  // 1 / temperature
  int32_t last;
  double unit;  // 1 / the whole mass, zero without any

  __device__ __forceinline__ int64_t mass(float logit) const {
    const float x = __fmul_rn(__fsub_rn(logit, peak), inverse);
    return x >= -36.0f ? __float2ll_rn(__fmul_rn(expf(x), kMassScale)) : 0;
  }
  __device__ __forceinline__ int64_t kept(float logit, int id) const {
    return logit > least || (logit == least && id <= last) ? mass(logit) : 0;
  }
  __device__ __forceinline__ double probability(float logit, int id) const {
    return __dmul_rn(double(kept(logit, id)), unit);
  }
};

// A number in [0, 1) for what it is for: the first of NumPy's Philox4x64 with this key.
enum Purpose : int { kToken = 0, kDraft = 1, kAccept = 2, kResidual = 3 };

__device__ inline double uniform(int64_t seed, int64_t position, int purpose) {
  uint64_t c0 = 1, c1 = 0, c2 = 0, c3 = 0;
  uint64_t k0 = uint64_t(seed), k1 = (uint64_t(purpose) << 32) + uint64_t(position);
  for (int round = 0; round < 10; ++round) {
    const uint64_t low0 = 0xD2E7470EE14C6C93ull * c0, high0 = __umul64hi(0xD2E7470EE14C6C93ull, c0);
    const uint64_t low1 = 0xCA5A826395121157ull * c2, high1 = __umul64hi(0xCA5A826395121157ull, c2);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B97F4A7C15ull;
    k1 += 0xBB67AE8584CAA73Bull;
  }
  return double(c0 >> 11) * 0x1p-53;
}

// What a running sum must pass for the draw: an integer below `total`.
__device__ __forceinline__ int64_t draw_mark(double draw, int64_t total) {
  const int64_t mark = int64_t(floor(draw * double(total)));
  return mark < total ? mark : total - 1;
}

}  // namespace dsuf

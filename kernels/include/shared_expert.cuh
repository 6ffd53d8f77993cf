// A product of the shared expert's FP8 weights with rows in the order of fragment.cuh.
//
// As the routed experts' (experts.cuh): weights are widened to BF16 with their scale in them, and the tensor cores sum
// along a warp's whole share of the contraction.
#pragma once
#include "fragment.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// Widened weights are 2^-30 of what they mean, so that scales up to 2^37 stay within BF16.
__device__ __forceinline__ uint32_t fp8_factor(uint32_t scale) { return min(scale + (120 - 30), 254u) * 0x00800080u; }

// Codes j of two words of four E4M3 codes in place in BF16, where they are 2^-120 of their values, times factor.
__device__ __forceinline__ uint32_t widen_fp8(uint32_t low, uint32_t high, int j, uint32_t factor) {
  const uint32_t apart = __byte_perm(low, high, (4 + j) << 12 | j << 4);
  return scale_bf16x2((apart & 0x80008000u) | (apart >> 4 & 0x07F007F0u), factor);
}

// Sixteen rows of weights, of which a lane reads two, `low` and `high`; a quad of lanes reads 64 neighbours of a row,
// two octets a lane, and of what is left over of an odd number of groups an octet each. The kSplit warps of a tile take
// runs.
template <int kWidth, int kSplit>
struct SharedShare {
  static constexpr int kGroups = kWidth / 32, kHalves = kGroups / 2, kTurns = (kHalves + kSplit - 1) / kSplit;
  static constexpr int kAtOnce = kTurns < 2 ? 1 : 2;
  const uint8_t *low, *scales;
  int high_offset, high_scales_offset;  // from `low` and from its scales

  // Add the products with the row of a lane's pair at `x`, null if there is none. Octets that follow each other in a
  // group's order are kLanes apart.
  template <int kLanes>
  __device__ __forceinline__ void multiply(float (&total)[4], const uint4* x, int share) const {
    const int part = threadIdx.x % 4, first = share * kTurns;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn += kAtOnce) {
      uint4 a[kAtOnce], b[kAtOnce], v[kAtOnce][2];
      uint32_t low_scale[kAtOnce], high_scale[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int half = min(first + turn + i, kHalves - 1), group = half * 2 + part / 2;
        a[i] = load_once(low + half * 64 + part * 16);
        b[i] = load_once(low + high_offset + half * 64 + part * 16);
        low_scale[i] = scales[group];
        high_scale[i] = scales[high_scales_offset + group];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int o = 0; o < 2; ++o)
          v[i][o] = first + turn + i < kHalves && turn + i < kTurns
                        ? octet_of<kLanes>(x, (first + turn + i) * 8 + part * 2 + o)
                        : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t low_factor = fp8_factor(low_scale[i]), high_factor = fp8_factor(high_scale[i]);
        add_octet(total, a[i].x, a[i].y, b[i].x, b[i].y, low_factor, high_factor, v[i][0]);
        add_octet(total, a[i].z, a[i].w, b[i].z, b[i].w, low_factor, high_factor, v[i][1]);
      }
    }
    if (kGroups % 2 == 0 || share != kSplit - 1) return;
    const int at = kHalves * 64 + part * 8;
    const uint2 a = *reinterpret_cast<const uint2*>(low + at);
    const uint2 b = *reinterpret_cast<const uint2*>(low + high_offset + at);
    add_octet(total, a.x, a.y, b.x, b.y, fp8_factor(scales[kHalves * 2]),
              fp8_factor(scales[high_scales_offset + kHalves * 2]), octet_of<kLanes>(x, kHalves * 8 + part));
  }

 private:
  template <int kLanes>
  __device__ static __forceinline__ uint4 octet_of(const uint4* x, int octet) {
    if (!x) return make_uint4(0, 0, 0, 0);
    const int place = fragment_place<kWidth>(octet), at = place / 4 * kLanes + place % 4;
    return kLanes == 32 ? load_shared(x + at) : load_fresh(x + at);
  }

  __device__ static __forceinline__ void add_octet(float (&total)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                                   uint32_t b1, uint32_t low_factor, uint32_t high_factor,
                                                   const uint4& x) {
    mma_bf16(total, widen_fp8(a0, a1, 0, low_factor), widen_fp8(b0, b1, 0, high_factor),
             widen_fp8(a0, a1, 1, low_factor), widen_fp8(b0, b1, 1, high_factor), x.x, x.y);
    mma_bf16(total, widen_fp8(a0, a1, 2, low_factor), widen_fp8(b0, b1, 2, high_factor),
             widen_fp8(a0, a1, 3, low_factor), widen_fp8(b0, b1, 3, high_factor), x.z, x.w);
  }
};

}  // namespace dsuf

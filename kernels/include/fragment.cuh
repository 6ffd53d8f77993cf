// BF16 rows in the order in which the expert kernels read them.
//
// Along the contraction, 128 values are four groups of four octets. A lane has a group, so the octets with one number
// in their groups stand together: octet q of group g at place 4 q + g. Groups beyond the last whole 128 stay where they
// are. Within an octet values stand as 0 4 1 5 2 6 3 7, the pairs that FP4 codes widen to (widen_fp4).
#pragma once
#include "numeric.cuh"

namespace dsuf {

// Where octet number `octet` of a row stands, in octets.
template <int kWidth>
__device__ __forceinline__ int fragment_place(int octet) {
  constexpr int kWhole = kWidth / 128 * 16;
  return octet < kWhole ? octet / 16 * 16 + octet % 4 * 4 + octet % 16 / 4 : octet;
}

__device__ __forceinline__ uint4 pack_fragment(const float (&x)[8]) {
  const float ordered[8] = {x[0], x[4], x[1], x[5], x[2], x[6], x[3], x[7]};
  return pack_bf16x8(ordered);
}

template <int kWidth>
__device__ __forceinline__ void store_fragment(uint16_t* row, int octet, const float (&x)[8]) {
  reinterpret_cast<uint4*>(row)[fragment_place<kWidth>(octet)] = pack_fragment(x);
}

}  // namespace dsuf

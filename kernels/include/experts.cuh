// A product of FP4 weights with the rows of the pairs that one expert serves.
//
// Weights are widened to BF16 with their scale in them, which is exact, and the tensor cores sum along a warp's whole
// share of the contraction: nothing is scaled afterwards but by one power of two. Codes were arranged for that within
// their words when they were loaded (arrange_codes).
#pragma once
#include "fragment.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// Warps that share a tile's contraction: as few as leave a lane at most five loads of a row.
template <int kWidth>
constexpr int kSplitOf = kWidth > 2560 ? 8 : kWidth > 1280 ? 4 : kWidth > 640 ? 2 : 1;

// Widened weights are 2^-30 of what they mean, so that scales from 2^-95 to 2^31 stay within BF16.
constexpr int kWidenShift = 30;
constexpr float kWidenScale = 1073741824.0f;

// The factor, twice, that makes weights of what widen_fp4 puts in place, from their E8M0 scale.
__device__ __forceinline__ uint32_t fp4_factor(uint32_t scale) {
  return min(scale + (126 - kWidenShift), 254u) * 0x00800080u;
}

// Eight E2M1 codes rearranged within their word, so that few instructions put them in place in BF16. In each half, bits
// 15 and 8 to 6 are sign and magnitude of its code 0, 12 and 5 to 3 of code 1, 13 and 2 to 0 of code 2, 14 and 11 to 9
// of code 3.
__device__ __forceinline__ uint32_t arrange_fp4(uint32_t codes) {
  constexpr int kSigns[4] = {15, 12, 13, 14}, kMagnitudes[4] = {6, 3, 0, 9};
  uint32_t arranged = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    arranged |= (codes >> (4 * j + 3) & 0x00010001u) << kSigns[j] | (codes >> 4 * j & 0x00070007u) << kMagnitudes[j];
  return arranged;
}

// Codes j and j + 4 of a word that was arranged, where in place in BF16 they are 2^-126 of their values, times factor.
__device__ __forceinline__ void widen_fp4(uint32_t (&wide)[4], uint32_t codes, uint32_t factor) {
  constexpr uint32_t kPlaces = 0x81C081C0u;
  wide[0] = scale_bf16x2(codes & kPlaces, factor);
  wide[1] = scale_bf16x2(codes << 3 & kPlaces, factor);
  // Moved by six and by two at once; what one half carries into the other stays below its places.
  wide[2] = scale_bf16x2((codes & 0x20072007u) * 68 & kPlaces, factor);
  wide[3] = scale_bf16x2((codes << 1 & 0x80008000u) | (codes >> 3 & 0x01C001C0u), factor);
}

// Sixteen rows of FP4 weights on their way into shared memory: of two rows, `low` and `high`, a lane has a group of every
// four (128 values, a chunk), and of the groups that are left over eight values each. Chunks go in runs to the kSplit
// warps of a tile; what is left over goes to the last of them. A lane reads but the weights that it copied, so that it
// waits for no other; the scales of the tile are copied by all its warps, with the first chunk.
template <int kWidth, int kSplit>
struct Fp4Tile {
  static constexpr int kGroups = kWidth / 32, kChunks = kGroups / 4, kLeft = kGroups % 4;
  static constexpr int kTurns = (kChunks + kSplit - 1) / kSplit, kBatches = kTurns > 0 ? kTurns : 1;
  uint4 chunks[kSplit][kBatches][2][32];
  uint32_t left[kLeft > 0 ? kLeft : 1][2][32];
  uint8_t scales[2][8][kGroups];

  // Rows of a lane begin at `low`, `high`; the scales of the tile's rows at `low_scales`, `high_scales`, 8-byte aligned.
  // kBatches batches of copies.
  __device__ __forceinline__ void load(const uint8_t* low, const uint8_t* high, const uint8_t* low_scales,
                                       const uint8_t* high_scales, int share) {
    const int lane = threadIdx.x % 32, part = lane % 4;
    for (int i = share * 32 + lane; i < 2 * kGroups; i += 32 * kSplit) {
      const int half = i / kGroups, at = i % kGroups * 8;
      copy_ahead<8>(&scales[half][0][0] + at, (half ? high_scales : low_scales) + at);
    }
#pragma unroll
    for (int t = 0; t < kBatches; ++t) {
      if (share * kTurns + t < kChunks && t < kTurns) {
        const int at = ((share * kTurns + t) * 4 + part) * 16;
        copy_ahead<16>(&chunks[share][t][0][lane], low + at);
        copy_ahead<16>(&chunks[share][t][1][lane], high + at);
      }
#pragma unroll
      for (int i = 0; i < kLeft && share == kSplit - 1 && t == kBatches - 1; ++i) {
        const int at = (kChunks * 4 + i) * 16 + part * 4;
        copy_ahead<4>(&left[i][0][lane], low + at);
        copy_ahead<4>(&left[i][1][lane], high + at);
      }
      close_batch();
    }
  }

  // Add the products with kTiles times eight pairs. `x` points to a lane's part of the first octets of its pair's row,
  // kLanes octets before the next ones; the result of a pair that is not there is not looked at. The first batch of all
  // the tile's warps is there; `behind` batches were begun behind this tile's.
  template <int kLanes, int kTiles>
  __device__ __forceinline__ void multiply(float (&total)[kTiles][4], const uint4* const (&x)[kTiles], int share,
                                           int behind = 0) const {
    const int lane = threadIdx.x % 32, first = share * kTurns;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      if (first + t >= kChunks) break;
      await_batches(kBatches - 1 - t + behind);
      const uint4 low = load_shared(&chunks[share][t][0][lane]), high = load_shared(&chunks[share][t][1][lane]);
      const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
      const int group = (first + t) * 4 + lane % 4;
      const uint32_t low_factor = fp4_factor(scales[0][lane / 4][group]);
      const uint32_t high_factor = fp4_factor(scales[1][lane / 4][group]);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        add_octets<kLanes>(total, a[q], b[q], low_factor, high_factor, x, (first + t) * 4 + q);
    }
    if (kLeft == 0 || share != kSplit - 1) return;
    await_batches(behind);
#pragma unroll
    for (int i = 0; i < kLeft; ++i)
      add_octets<kLanes>(total, left[i][0][lane], left[i][1][lane], fp4_factor(scales[0][lane / 4][kChunks * 4 + i]),
                         fp4_factor(scales[1][lane / 4][kChunks * 4 + i]), x, kChunks * 4 + i);
  }

 private:
  // Eight weights a lane of each row with octet number `at` of every pair.
  template <int kLanes, int kTiles>
  __device__ static __forceinline__ void add_octets(float (&total)[kTiles][4], uint32_t a, uint32_t b,
                                                    uint32_t low_factor, uint32_t high_factor,
                                                    const uint4* const (&x)[kTiles], int at) {
    uint32_t wide[2][4];
    widen_fp4(wide[0], a, low_factor);
    widen_fp4(wide[1], b, high_factor);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint4 octet = kLanes == 32 ? load_shared(x[i] + at * kLanes) : load_global(x[i] + at * kLanes);
      mma_bf16(total[i], wide[0][0], wide[1][0], wide[0][1], wide[1][1], octet.x, octet.y);
      mma_bf16(total[i], wide[0][2], wide[1][2], wide[0][3], wide[1][3], octet.z, octet.w);
    }
  }
};

// What the warps of a block hold of their tiles, in shared memory: [warp][output][pair], a column more than there are
// pairs against bank conflicts. `sum` adds what the kSplit warps of a tile have, in their order.
template <int kSplit>
struct TileSums {
  float part[8][16][9];

  __device__ __forceinline__ void put(const float (&total)[4]) {
    const int warp = threadIdx.x / 32, output = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) part[warp][output + i / 2 * 8][pair + i % 2] = total[i];
  }

  // Output `output` of the sixteen of tile `tile` of the block.
  __device__ __forceinline__ float sum(int tile, int output, int pair) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kSplit; ++i) total = __fadd_rn(total, part[tile * kSplit + i][output][pair]);
    return __fmul_rn(total, kWidenScale);
  }
};

__device__ __forceinline__ float swiglu(float a, float b) {
  a = fminf(a, DSUF_SWIGLU_LIMIT);
  b = fminf(fmaxf(b, -DSUF_SWIGLU_LIMIT), DSUF_SWIGLU_LIMIT);
  return __fmul_rn(__fmul_rn(a, sigmoid(a)), b);
}

}  // namespace dsuf

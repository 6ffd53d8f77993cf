// A product of FP4 weights with the rows of the pairs that one expert serves.
//
// Weights are widened to BF16 with their scale in them, which is exact, and the tensor cores sum along a warp's whole
// share of the contraction: nothing is scaled afterwards but by one power of two.
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

// Codes j and j + 4 of a word of eight E2M1 codes in place in BF16, where they are 2^-126 of their values, times factor.
__device__ __forceinline__ uint32_t widen_fp4(uint32_t codes, int j, uint32_t factor) {
  const uint32_t sign = codes << (12 - 4 * j), magnitude = j < 2 ? codes << (6 - 4 * j) : codes >> (4 * j - 6);
  return scale_bf16x2((sign & 0x80008000u) | (magnitude & 0x01C001C0u), factor);
}

// One warp's share of sixteen rows of FP4 weights, in registers: of two rows, `low` and `high`, a lane has a group of
// every four (128 values, a chunk), and of the groups that are left over eight values each. Chunks go in runs to the
// kSplit warps of a tile; what is left over goes to the last of them.
template <int kWidth, int kSplit>
struct Fp4Share {
  static constexpr int kGroups = kWidth / 32, kChunks = kGroups / 4, kLeft = kGroups % 4;
  static constexpr int kTurns = (kChunks + kSplit - 1) / kSplit;
  uint4 low[kTurns > 0 ? kTurns : 1], high[kTurns > 0 ? kTurns : 1];
  uint32_t low_left[kLeft > 0 ? kLeft : 1], high_left[kLeft > 0 ? kLeft : 1];
  uint8_t low_scale[kTurns + kLeft], high_scale[kTurns + kLeft];
  int first;

  // Rows begin at `low`, `high`, their scales at `low_scales`, `high_scales`.
  __device__ __forceinline__ void load(const uint8_t* low_row, const uint8_t* high_row, const uint8_t* low_scales,
                                       const uint8_t* high_scales, int share) {
    const int part = threadIdx.x % 4;
    first = share * kTurns;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int group = min(first + t, kChunks - 1) * 4 + part;
      low[t] = load_once(low_row + group * 16);
      high[t] = load_once(high_row + group * 16);
    }
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      low_left[i] = *reinterpret_cast<const uint32_t*>(low_row + (kChunks * 4 + i) * 16 + part * 4);
      high_left[i] = *reinterpret_cast<const uint32_t*>(high_row + (kChunks * 4 + i) * 16 + part * 4);
    }
#pragma unroll
    for (int t = 0; t < kTurns + kLeft; ++t) {
      const int group = t < kTurns ? min(first + t, kChunks - 1) * 4 + part : kChunks * 4 + t - kTurns;
      low_scale[t] = low_scales[group];
      high_scale[t] = high_scales[group];
    }
  }

  // Add the products with kTiles times eight pairs. `x` points to a lane's part of the first octets of its pair's row,
  // kLanes octets before the next ones; null: no such pair.
  template <int kLanes, int kTiles>
  __device__ __forceinline__ void multiply(float (&total)[kTiles][4], const uint4* const (&x)[kTiles],
                                           int share) const {
    uint4 now[4], next[4];  // of one tile, a chunk ahead
    if (kTiles == 1) load_chunk<kLanes>(next, x[0], first);
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      if (first + t >= kChunks) break;
      if (kTiles == 1) {
#pragma unroll
        for (int q = 0; q < 4; ++q) now[q] = next[q];
        if (t + 1 < kTurns) load_chunk<kLanes>(next, x[0], first + t + 1);
      }
      const uint32_t a[4] = {low[t].x, low[t].y, low[t].z, low[t].w};
      const uint32_t b[4] = {high[t].x, high[t].y, high[t].z, high[t].w};
      const uint32_t low_factor = fp4_factor(stay(low_scale[t])), high_factor = fp4_factor(stay(high_scale[t]));
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint4 octet[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) octet[i] = kTiles == 1 ? now[q] : octet_of<kLanes>(x[i], first + t, q);
        add_octets(total, stay(a[q]), stay(b[q]), low_factor, high_factor, octet);
      }
    }
    if (share != kSplit - 1) return;
#pragma unroll
    for (int l = 0; l < kLeft; ++l) {
      uint4 octet[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) octet[i] = octet_of<kLanes>(x[i], kChunks, l);
      add_octets(total, stay(low_left[l]), stay(high_left[l]), fp4_factor(stay(low_scale[kTurns + l])),
                 fp4_factor(stay(high_scale[kTurns + l])), octet);
    }
  }

 private:
  template <int kLanes>
  __device__ static __forceinline__ uint4 octet_of(const uint4* x, int chunk, int q) {
    if (!x) return make_uint4(0, 0, 0, 0);
    return kLanes == 32 ? load_shared(x + (chunk * 4 + q) * kLanes) : load_global(x + (chunk * 4 + q) * kLanes);
  }

  template <int kLanes>
  __device__ static __forceinline__ void load_chunk(uint4 (&octets)[4], const uint4* x, int chunk) {
#pragma unroll
    for (int q = 0; q < 4; ++q) octets[q] = octet_of<kLanes>(x, min(chunk, kChunks - 1), q);
  }

  // Eight weights a lane of each row with an octet of every pair.
  template <int kTiles>
  __device__ static __forceinline__ void add_octets(float (&total)[kTiles][4], uint32_t a, uint32_t b,
                                                    uint32_t low_factor, uint32_t high_factor,
                                                    const uint4 (&octet)[kTiles]) {
    uint32_t wide[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wide[0][j] = widen_fp4(a, j, low_factor);
      wide[1][j] = widen_fp4(b, j, high_factor);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mma_bf16(total[i], wide[0][0], wide[1][0], wide[0][1], wide[1][1], octet[i].x, octet[i].y);
      mma_bf16(total[i], wide[0][2], wide[1][2], wide[0][3], wide[1][3], octet[i].z, octet[i].w);
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

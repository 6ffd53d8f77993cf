// A product of FP4 weights with the FP8 rows of the pairs that one expert serves.
#pragma once
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

// Warps that share a tile's contraction; with little of it for each, a warp has a tile for itself.
template <int kWidth>
constexpr int kSplitOf = kWidth >= 2048 ? 8 : kWidth >= 1024 ? 4 : kWidth >= 512 ? 2 : 1;

// Eight pairs, as a lane sees them: eight values a group of its own row, and the scales of the two it has results of.
// A null pointer is a pair that is not there.
struct PairTile {
  const uint8_t *x, *even_scale, *odd_scale;
};

// Four codes each of a word of eight E2M1 codes as E4M3, 2^-6 of their values: those of even and of odd place.
__device__ __forceinline__ uint32_t even_e4m3(uint32_t codes) {
  return (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu);
}
__device__ __forceinline__ uint32_t odd_e4m3(uint32_t codes) {
  return (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu);
}

// 2^6 times the product of two E8M0 scales, of which one is given less kScaleBias.
constexpr int kScaleBias = 121;
__device__ __forceinline__ float product_of_scales(int less_bias, int scale) {
  return __int_as_float(__viaddmin_s32_relu(less_bias, scale, 255) << 23);
}

__device__ __forceinline__ int scale_byte(uint32_t scales, int i) { return int(scales >> (8 * i) & 0xFFu); }

// One warp's share of a tile of sixteen outputs by eight pairs, for kMatrices matrices of one shape: outputs from `low`
// and eight rows on. A lane reads eight weights of two outputs and eight values of one row a group; runs of four groups
// go to the kSplit warps of a tile in turn (of one, where groups do not come in fours).
template <int kWidth, int kSplit, int kMatrices>
__device__ __forceinline__ void multiply_fp4(float (&total)[kMatrices][4], const uint8_t* const (&low)[kMatrices],
                                             const uint8_t* const (&low_scale)[kMatrices], const PairTile& tile,
                                             int share) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kGroups = kWidth / 32, kRun = kGroups % 4 ? 1 : 4, kUnroll = kMatrices > 1 ? 1 : 5 - kRun;
#pragma unroll kUnroll
  for (int at = share * kRun; at < kGroups; at += kSplit * kRun) {
    uint32_t a[kMatrices][kRun], b[kMatrices][kRun], w0[kMatrices], w1[kMatrices];
    uint2 v[kRun];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int g = 0; g < kRun; ++g) {
        a[m][g] = *reinterpret_cast<const uint32_t*>(low[m] + (at + g) * 16);
        b[m][g] = *reinterpret_cast<const uint32_t*>(low[m] + 8 * (kWidth / 2) + (at + g) * 16);
      }
      w0[m] = load_scales<kRun>(low_scale[m] + at);
      w1[m] = load_scales<kRun>(low_scale[m] + 8 * kGroups + at);
    }
#pragma unroll
    for (int g = 0; g < kRun; ++g)
      v[g] = tile.x ? *reinterpret_cast<const uint2*>(tile.x + (at + g) * 32) : make_uint2(0, 0);
    const uint32_t x0 = tile.even_scale ? load_scales<kRun>(tile.even_scale + at) : 0;
    const uint32_t x1 = tile.odd_scale ? load_scales<kRun>(tile.odd_scale + at) : 0;
#pragma unroll
    for (int g = 0; g < kRun; ++g) {
      const uint32_t even = __byte_perm(v[g].x, v[g].y, 0x6420), odd = __byte_perm(v[g].x, v[g].y, 0x7531);
      const int y0 = scale_byte(x0, g), y1 = scale_byte(x1, g);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const int s0 = scale_byte(w0[m], g) - kScaleBias, s1 = scale_byte(w1[m], g) - kScaleBias;
        float c[4] = {};
        mma_e4m3(c, even_e4m3(a[m][g]), even_e4m3(b[m][g]), odd_e4m3(a[m][g]), odd_e4m3(b[m][g]), even, odd);
        total[m][0] = __fmaf_rn(c[0], product_of_scales(s0, y0), total[m][0]);
        total[m][1] = __fmaf_rn(c[1], product_of_scales(s0, y1), total[m][1]);
        total[m][2] = __fmaf_rn(c[2], product_of_scales(s1, y0), total[m][2]);
        total[m][3] = __fmaf_rn(c[3], product_of_scales(s1, y1), total[m][3]);
      }
    }
  }
}

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

  // Output `column` of the block's, of which each tile has sixteen.
  __device__ __forceinline__ float sum(int column, int pair) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kSplit; ++i) total = __fadd_rn(total, part[column / 16 * kSplit + i][column % 16][pair]);
    return total;
  }
};

__device__ __forceinline__ float swiglu(float a, float b) {
  a = fminf(a, DSUF_SWIGLU_LIMIT);
  b = fminf(fmaxf(b, -DSUF_SWIGLU_LIMIT), DSUF_SWIGLU_LIMIT);
  return __fmul_rn(__fmul_rn(a, sigmoid(a)), b);
}

}  // namespace dsuf

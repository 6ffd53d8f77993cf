// A quantised linear layer for few rows: FP8 weights and inputs, one scale a 32 x 32 block and a row's 32 values.
//
//   out[r, n] = bf16(sum over groups g of ws[n / 32, g] * xs[r, g] * (sum over g of w[n, k] * x[r, k]))
//
// Shapes: ProjectFp8; an entry a contraction width: project_fp8_dim, _q_lora, _o, _engram, _taps. Rows of codes
// and weights 16-byte aligned; n a multiple of 16 where there are `second` outputs. A lane reads sixteen neighbours of a
// row, so that four lanes have two groups: each group is a product in which the other's lanes hold zeros, and that
// float32 tensor-core sum of exact products is scaled and added in a fixed order per warp, then warp by warp. A row's
// result depends on nothing but its input. Grid: (ceil((n + second_n) / 16), ceil(rows / 32)); the warps of a block (4,
// 8 or 16, by the width) take pairs of groups in turn. Entries with `_many` serve many rows: each weight is decoded
// once for a block's 32 rows, with the same sums. The first weights are on their way before the input is there;
// behind project_fp8_q_lora attention may start with all but the queries. announce_fp8_o is project_fp8_o, and the rank
// then announces, as announce_partial does, that its part is there. Padding: zeros. Bound: the weights' bytes, n * k, read
// once for every 32 rows.
#include "contract.h"
#include "launch.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "peers.cuh"

namespace dsuf {

// Two scales, or one where the number of groups is odd and it is the last.
template <int kGroups>
__device__ __forceinline__ uint32_t pair_scales(const uint8_t* at, int group) {
  if constexpr (kGroups % 2 == 0) return *reinterpret_cast<const uint16_t*>(at + group);
  return at[group] | (group + 1 < kGroups ? uint32_t(at[group + 1]) << 8 : 0);
}

// Whether a lane's sixteen values of a pair of groups are there: an odd number of groups leaves a half.
template <int kGroups>
__device__ __forceinline__ bool has_half(int pair) {
  return kGroups % 2 == 0 || pair * 2 + int(threadIdx.x % 4 / 2) < kGroups;
}

// Of two groups, sixteen weights of two outputs, and the scales.
template <int kGroups>
struct WeightPair {
  uint4 low, high;
  uint32_t scales;

  __device__ __forceinline__ void load(const uint8_t* w_low, const uint8_t* w_high, const uint8_t* ws, int pair) {
    const bool inside = has_half<kGroups>(pair);
    low = inside ? load_once(w_low + pair * 64) : make_uint4(0, 0, 0, 0);
    high = inside ? load_once(w_high + pair * 64) : make_uint4(0, 0, 0, 0);
    scales = pair_scales<kGroups>(ws, pair * 2);
  }
};

// Of two groups, sixteen values of the lane's row, and the scales of the two rows that it has results of.
template <int kGroups>
struct RowPair {
  uint4 x;
  uint32_t even, odd;
};

// Weights in FP16, four registers of a product for every four of the sixteen values of two outputs.
struct DecodedPair {
  uint32_t a[4][4];

  template <int kGroups>
  __device__ __forceinline__ explicit DecodedPair(const WeightPair<kGroups>& w) {
    const uint32_t low[4] = {w.low.x, w.low.y, w.low.z, w.low.w}, high[4] = {w.high.x, w.high.y, w.high.z, w.high.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t x = stay(low[j]), y = stay(high[j]);
      a[j][0] = decode_e4m3x2(x), a[j][1] = decode_e4m3x2(y);
      a[j][2] = decode_e4m3x2(x >> 16), a[j][3] = decode_e4m3x2(y >> 16);
    }
  }
};

template <int kGroups>
__device__ __forceinline__ void add_pair(float (&total)[4], uint32_t scales, const DecodedPair& d,
                                         const RowPair<kGroups>& r) {
  const uint32_t v[4] = {r.x.x, r.x.y, r.x.z, r.x.w};
  const bool second = threadIdx.x % 4 >= 2;
  float c[2][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t b0 = decode_e4m3x2(v[j]), b1 = decode_e4m3x2(v[j] >> 16);
    mma_f16(c[0], d.a[j][0], d.a[j][1], d.a[j][2], d.a[j][3], second ? 0 : b0, second ? 0 : b1);
    mma_f16(c[1], d.a[j][0], d.a[j][1], d.a[j][2], d.a[j][3], second ? b0 : 0, second ? b1 : 0);
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const float s = pick_scale(scales, g), s0 = s * pick_scale(r.even, g), s1 = s * pick_scale(r.odd, g);
    total[0] = __fmaf_rn(c[g][0], s0, total[0]);
    total[1] = __fmaf_rn(c[g][1], s1, total[1]);
    total[2] = __fmaf_rn(c[g][2], s0, total[2]);
    total[3] = __fmaf_rn(c[g][3], s1, total[3]);
  }
}

// Sixteen outputs from `first` on, by tiles of eight rows, or with kMany of four tiles at once: their totals and rows
// leave registers for five pairs' weights at a time only where these are all.
template <int kWidth, int kWarps, bool kMany = false>
struct Projection {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  static constexpr int kGroups = kWidth / 32, kPairs = (kGroups + 1) / 2, kTurns = (kPairs + kWarps - 1) / kWarps;
  static constexpr int kAtOnce = kTurns <= 5 ? kTurns : kMany ? 3 : 5;
  const uint8_t *low, *high, *weight_scale;
  WeightPair<kGroups> weight[kAtOnce];

  template <class Params>
  __device__ __forceinline__ Projection(const Params& p, int first) {
    const int lane = threadIdx.x % 32, last = p.n + p.second_n - 1;
    low = p.weight + int64_t(min(first + lane / 4, last)) * kWidth + lane % 4 * 16;
    high = p.weight + int64_t(min(first + lane / 4 + 8, last)) * kWidth + lane % 4 * 16;
    weight_scale = p.weight_scale + int64_t(first / 32) * kGroups;
    load(0);
  }

  __device__ static __forceinline__ int pair_of(int turn) { return turn * kWarps + threadIdx.x / 32; }

  __device__ __forceinline__ void load(int turn) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (pair_of(turn + i) < kPairs) weight[i].load(low, high, weight_scale, pair_of(turn + i));
  }

  // What a lane reads of rows from `row0` on, of which `live` are there in all. Tiles of eight rows stand at offsets that
  // the compiler knows, so that more tiles need no more addresses.
  struct Rows {
    const uint8_t *x, *scale;
    int left;

    template <class Params>
    __device__ __forceinline__ Rows(const Params& p, int row0, int live) : left(live - row0) {
      const int lane = threadIdx.x % 32;
      x = p.codes + int64_t(row0 + lane / 4) * kWidth + lane % 4 * 16;
      scale = p.scales + int64_t(row0 + lane % 4 * 2) * kGroups;
    }
    __device__ __forceinline__ void load(RowPair<kGroups>& to, int pair, int tile = 0) const {
      const int row = threadIdx.x % 32 / 4, even = threadIdx.x % 4 * 2, inside = left - tile * 8;
      const uint8_t *v = x + tile * 8 * kWidth + pair * 64, *s = scale + tile * 8 * kGroups;
      to.x = row < inside && has_half<kGroups>(pair) ? load_global(v) : make_uint4(0, 0, 0, 0);
      to.even = even < inside ? pair_scales<kGroups>(s, pair * 2) : 0;
      to.odd = even + 1 < inside ? pair_scales<kGroups>(s + kGroups, pair * 2) : 0;
    }
  };

  // The warp's part of the products with up to eight rows.
  template <class Params>
  __device__ __forceinline__ void add_rows(float (&total)[4], const Params& p, int row0, int live, bool again) {
    const Rows from(p, row0, live);
    for (int turn = 0; turn < kTurns; turn += kAtOnce) {
      if (kTurns > kAtOnce && (again || turn)) load(turn);
      RowPair<kGroups> rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (pair_of(turn + i) < kPairs) from.load(rows[i], pair_of(turn + i));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (pair_of(turn + i) < kPairs) add_pair(total, weight[i].scales, DecodedPair(weight[i]), rows[i]);
    }
  }

  // The same with up to 32 rows, for which a weight is decoded once; every row's sum is the same.
  template <class Params>
  __device__ __forceinline__ void add_many(float (&total)[4][4], const Params& p, int row0, int live) {
    const Rows from(p, row0, live);
    for (int turn = 0; turn < kTurns; turn += kAtOnce) {
      if (kTurns > kAtOnce && turn) load(turn);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (pair_of(turn + i) >= kPairs) break;
        RowPair<kGroups> rows[4];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) from.load(rows[tile], pair_of(turn + i), tile);
        const DecodedPair decoded(weight[i]);
#pragma unroll
        for (int tile = 0; tile < 4; ++tile)
          if (tile * 8 < from.left) add_pair(total[tile], weight[i].scales, decoded, rows[tile]);
      }
    }
  }
};

// What the warps have of up to eight rows from `row0` on, added up in their order and written.
template <int kWarps, class Params>
__device__ __forceinline__ void store_rows(const Params& p, const float (&total)[4], int row0, int live) {
  const int output = blockIdx.x * 16 + threadIdx.x / 8, to = row0 + threadIdx.x % 8;
  const float sum = sum_tiles<kWarps>(total);
  if (threadIdx.x >= 128 || to >= p.rows) return;
  const uint16_t rounded = to < live ? bf16_bits(sum) : 0;
  if (output < p.n) {
    p.out[int64_t(to) * p.n + output] = rounded;
  } else if (output < p.n + p.second_n) {
    p.second[int64_t(to) * p.second_n + output - p.n] = rounded;
  }
}

// With kHoldsNext the launch behind may count on all ahead of this one (launch.cuh).
template <bool kHoldsNext>
__device__ __forceinline__ void await_rows() {
  if constexpr (kHoldsNext)
    await_inputs_first();
  else
    await_inputs();
}

// At most 32 rows a block, eight at a time.
template <int kWidth, int kWarps, bool kHoldsNext = false, class Params>
__device__ void project(const Params& p) {
  Projection<kWidth, kWarps> projection(p, blockIdx.x * 16);
  const int live = min(early_live(p.live), p.rows), stop = min(p.rows, int(blockIdx.y + 1) * 32);
  await_rows<kHoldsNext>();
  for (int row0 = blockIdx.y * 32; row0 < stop; row0 += 8) {
    float total[4] = {};
    if (row0 < live) projection.add_rows(total, p, row0, live, row0 > int(blockIdx.y) * 32);
    store_rows<kWarps>(p, total, row0, live);
  }
}

// The same at once: the weights of a block are loaded and decoded once for all its rows.
template <int kWidth, int kWarps, bool kHoldsNext = false, class Params>
__device__ void project_many(const Params& p) {
  Projection<kWidth, kWarps, true> projection(p, blockIdx.x * 16);
  const int live = min(early_live(p.live), p.rows), first = blockIdx.y * 32;
  await_rows<kHoldsNext>();
  float total[4][4] = {};
  if (first < live) projection.add_many(total, p, first, live);
#pragma unroll
  for (int tile = 0; tile < 4; ++tile)
    if (first + tile * 8 < p.rows) store_rows<kWarps>(p, total[tile], first + tile * 8, live);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(512) project_fp8_dim(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_DIM, 16>(p);
}
extern "C" __global__ void __launch_bounds__(128) project_fp8_q_lora(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_Q_LORA, 4, true>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_o(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_O_GROUPS * DSUF_O_LORA, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256) announce_fp8_o(const dsuf::AnnounceFp8 p) {
  dsuf::project<DSUF_O_GROUPS * DSUF_O_LORA, 8>(p);
  dsuf::announce_as_last(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_engram(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_ENGRAM_WIDTH, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_fp8_taps(const dsuf::ProjectFp8 p) {
  dsuf::project<DSUF_TAPS * DSUF_DIM, 8>(p);
}
extern "C" __global__ void __launch_bounds__(512) project_fp8_dim_many(const dsuf::ProjectFp8 p) {
  dsuf::project_many<DSUF_DIM, 16>(p);
}
extern "C" __global__ void __launch_bounds__(128, 4) project_fp8_q_lora_many(const dsuf::ProjectFp8 p) {
  dsuf::project_many<DSUF_Q_LORA, 4, true>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) project_fp8_o_many(const dsuf::ProjectFp8 p) {
  dsuf::project_many<DSUF_O_GROUPS * DSUF_O_LORA, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) project_fp8_engram_many(const dsuf::ProjectFp8 p) {
  dsuf::project_many<DSUF_ENGRAM_WIDTH, 8>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) project_fp8_taps_many(const dsuf::ProjectFp8 p) {
  dsuf::project_many<DSUF_TAPS * DSUF_DIM, 8>(p);
}

// The second half of the experts: out = bf16(w2 fp8(inner)), a row for every (row, pick) pair and one of the shared
// expert for every row.
//
// Shapes: ExpertsDown; rows of weights 16-byte aligned; dim a multiple of 16. A block quantises the rows that it needs,
// 32 values a scale, and keeps in shared memory what the codes mean. Its weights are on their way before experts_up has
// ended, which waits before it lets this one start. Pairs and order of sums as in experts_up. Where warps share no
// contraction (kSplitOf) each has kEach tiles of sixteen outputs, one after the other. Grid: (ceil(dim / 16 / tiles of a
// block), ceil(rows / 32) + slots), as in experts_up. Padding is never routed, and its rows of the shared expert stay as
// they are. Bound: bytes, dim * inter * 17 / 32 an expert in use.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"
#include "shared_expert.cuh"

namespace dsuf {

constexpr int kSplit = kSplitOf<DSUF_INTER>, kAbreast = 8 / kSplit, kEach = kSplit == 1 ? 2 : 1;
constexpr int kMostTiles = 2, kOctets = DSUF_INTER / 8;
using Tile = Fp4Tile<DSUF_INTER, kSplit>;

// What is in a block's shared memory: which pairs, their rows as quantize_rows leaves them, weights.
struct Staged {
  int pair[kMostTiles * 8];
  uint4 rows[kMostTiles][8 * kOctets];
  Tile tiles[kEach][kAbreast];
};

__device__ __forceinline__ int first_output(int each) {
  return ((blockIdx.x * kEach + each) * kAbreast + int(threadIdx.x) / 32 / kSplit) * 16;
}

// Start copying the weights of the warp's tile number `each`; of another where it is past the end.
__device__ __forceinline__ void load_tile(const ExpertsDown& p, Staged& staged, int64_t expert, int each) {
  const int first = first_output(each) < DSUF_DIM ? first_output(each) : 0, warp = threadIdx.x / 32;
  const int64_t low = expert * DSUF_DIM + first, row = (low + threadIdx.x % 32 / 4) * (DSUF_INTER / 2);
  const uint8_t* scales = p.w2_scale + low * (DSUF_INTER / 32);
  staged.tiles[each][warp / kSplit].load(p.w2 + row, p.w2 + row + 8 * (DSUF_INTER / 2), scales,
                                         scales + 8 * (DSUF_INTER / 32), warp % kSplit);
}

// What up to eight quantised rows mean, as multiply takes them: lane after lane. row_of(i) is row i of `count`.
template <class RowOf>
__device__ __forceinline__ void quantize_rows(uint4* to, int count, RowOf row_of) {
  for (int from = 0; from < count * kOctets; from += 256) {
    const int item = from + threadIdx.x, pair = item / kOctets, octet = item % kOctets;
    float x[8] = {};
    if (pair < count) unpack_bf16x8(reinterpret_cast<const uint4*>(row_of(pair))[octet], x);
    quantize_octet<Fp8>(x, false, nullptr, nullptr, octet);
    const int place = fragment_place<DSUF_INTER>(octet);
    if (pair < count) to[place / 4 * 32 + pair * 4 + place % 4] = pack_fragment(x);
  }
}

// One tile's results of up to eight pairs, where a warp has the whole contraction; row_of(i) is where row i goes,
// null where there is none.
template <class RowOf>
__device__ __forceinline__ void store_tile(const float (&total)[4], int first, RowOf row_of) {
  const int output = first + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint16_t* row = row_of(threadIdx.x % 4 * 2 + i);
    if (!row || output >= DSUF_DIM) continue;
    row[output] = bf16_bits(__fmul_rn(total[i], kWidenScale));
    row[output + 8] = bf16_bits(__fmul_rn(total[i + 2], kWidenScale));
  }
}

// The same where warps share it.
template <class RowOf>
__device__ __forceinline__ void store_sums(const float (&total)[4], RowOf row_of) {
  __shared__ TileSums<kSplit> sums;
  __syncthreads();
  sums.put(total);
  __syncthreads();
  for (int e = threadIdx.x; e < 8 * kAbreast * 16; e += 256) {
    const int column = e % (kAbreast * 16), pair = e / (kAbreast * 16), output = blockIdx.x * kAbreast * 16 + column;
    uint16_t* row = row_of(pair);
    if (row && output < DSUF_DIM) row[output] = bf16_bits(sums.sum(column / 16, column % 16, pair));
  }
}

template <class RowOf>
__device__ __forceinline__ void store_results(const float (&total)[4], int first, RowOf row_of) {
  if constexpr (kSplit == 1) {
    store_tile(total, first, row_of);
  } else {
    store_sums(total, row_of);
  }
}

// Up to 8 * kTiles pairs from `at` on, all tiles of the block, which may still be on their way.
template <int kTiles>
__device__ __forceinline__ void serve(const ExpertsDown& p, Staged& staged, int at, int stop) {
  const int warp = threadIdx.x / 32;
  __syncthreads();
  if (threadIdx.x < kTiles * 8) staged.pair[threadIdx.x] = at + threadIdx.x < stop ? __ldcg(p.order + at + threadIdx.x) : -1;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    quantize_rows(staged.rows[i], min(stop - at - i * 8, 8),
                  [&](int pair) { return p.inner + int64_t(staged.pair[i * 8 + pair]) * DSUF_INTER; });
  const uint4* x[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) x[i] = staged.rows[i] + threadIdx.x % 32;
#pragma unroll
  for (int each = 0; each < kEach; ++each) {
    const int behind = (kEach - 1 - each) * Tile::kBatches;
    await_batches(behind + Tile::kBatches - 1);
    each ? __syncwarp() : __syncthreads();
    float total[kTiles][4] = {};
    staged.tiles[each][warp / kSplit].template multiply<32, kTiles>(total, x, warp % kSplit, behind);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      store_results(total[i], first_output(each), [&](int pair) {
        return staged.pair[i * 8 + pair] >= 0 ? p.out + int64_t(staged.pair[i * 8 + pair]) * DSUF_DIM : nullptr;
      });
  }
}

// The shared expert on the 32 rows of the block.
__device__ __forceinline__ void serve_shared(const ExpertsDown& p, uint4* rows) {
  const int lane = threadIdx.x % 32, live = min(early_live(p.live), p.rows), stop = min(live, int(blockIdx.y + 1) * 32);
  for (int row0 = blockIdx.y * 32; row0 < stop; row0 += 8) {
    __syncthreads();
    quantize_rows(rows, min(live - row0, 8),
                  [&](int i) { return p.shared_inner + int64_t(row0 + i) * DSUF_INTER; });
    __syncthreads();
#pragma unroll 1
    for (int each = 0; each < kEach; ++each) {
      const int first = first_output(each), low = (first < DSUF_DIM ? first : 0) + lane / 4;
      const SharedShare<DSUF_INTER, kSplit> share = {p.shared + int64_t(low) * DSUF_INTER,
                                                     p.shared_scale + low / 32 * (DSUF_INTER / 32), 8 * DSUF_INTER, 0};
      float total[4] = {};
      share.template multiply<32>(total, rows + lane / 4 * 4, threadIdx.x / 32 % kSplit);
      store_results(total, first, [&](int i) {
        return row0 + i < live ? p.shared_out + int64_t(row0 + i) * DSUF_DIM : nullptr;
      });
    }
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256, 4) experts_down(const dsuf::ExpertsDown p) {
  using namespace dsuf;
  extern __shared__ __align__(16) uint8_t memory[];
  let_next_start();
  static_assert(DSUF_DIM % 16 == 0 && DSUF_INTER % 32 == 0, "tiles and groups are whole");
  Staged& staged = *reinterpret_cast<Staged*>(memory);
  const int slot = int(blockIdx.y) - (p.rows + 31) / 32;
  if (slot < 0) {
    await_ahead();
    return serve_shared(p, staged.rows[0]);
  }
  // Which experts there are was known before experts_up began.
  const int used = __ldcg(p.used), expert = __ldcg(p.expert + slot);
  const int begin = __ldcg(p.first + slot), stop = __ldcg(p.first + slot + 1);
  if (slot >= used) return;
#pragma unroll
  for (int each = 0; each < kEach; ++each) load_tile(p, staged, expert, each);
  await_ahead();
  for (int at = begin; at < stop; at += 8 * kMostTiles)
    stop - at > 8 ? serve<kMostTiles>(p, staged, at, stop) : serve<1>(p, staged, at, stop);
}

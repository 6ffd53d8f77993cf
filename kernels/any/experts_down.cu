// The second half of the experts: out = bf16(w2 fp8(inner)), a row for every (row, pick) pair and one of the shared
// expert for every row.
//
// Shapes: ExpertsDown; rows of weights 16-byte aligned; dim a multiple of 16. A block quantises the rows that it needs,
// 32 values a scale, and keeps in shared memory what the codes mean. Pairs and order of sums as in experts_up. Where
// warps share no contraction (kSplitOf) each has kEach tiles of sixteen outputs, one after the other, the next one's
// weights on their way. Grid: (ceil(dim / 16 / tiles of a block), ceil(rows / 32) + slots), as in experts_up. Padding is
// never routed, and its rows of the shared expert stay as they are. Bound: bytes, dim * inter * 17 / 32 an expert in use.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"
#include "shared_expert.cuh"

namespace dsuf {

constexpr int kSplit = kSplitOf<DSUF_INTER>, kAbreast = 8 / kSplit, kEach = kSplit == 1 ? 4 : 1;
constexpr int kMostTiles = DSUF_INTER <= 640 ? 2 : 1, kOctets = DSUF_INTER / 8;
using Share = Fp4Share<DSUF_INTER, kSplit>;

__device__ __forceinline__ int first_output(int each) {
  return ((blockIdx.x * kEach + each) * kAbreast + int(threadIdx.x) / 32 / kSplit) * 16;
}

// The weights of the warp's tile number `each`; of another where it is past the end.
__device__ __forceinline__ void load_tile(const ExpertsDown& p, Share& share, int64_t expert, int each) {
  const int first = first_output(each) < DSUF_DIM ? first_output(each) : 0;
  const int64_t low = expert * DSUF_DIM + first + threadIdx.x % 32 / 4, high = low + 8;
  share.load(p.w2 + low * (DSUF_INTER / 2), p.w2 + high * (DSUF_INTER / 2), p.w2_scale + low * (DSUF_INTER / 32),
             p.w2_scale + high * (DSUF_INTER / 32), threadIdx.x / 32 % kSplit);
}

// What eight quantised rows mean, as multiply takes them: lane after lane. row_of(i) is row i, null where there is none.
template <class RowOf>
__device__ __forceinline__ void quantize_rows(uint4* to, RowOf row_of) {
  for (int from = 0; from < 8 * kOctets; from += 256) {
    const int item = from + threadIdx.x, pair = item / kOctets, octet = item % kOctets;
    const uint16_t* row = item < 8 * kOctets ? row_of(pair) : nullptr;
    float x[8] = {};
    if (row) unpack_bf16x8(reinterpret_cast<const uint4*>(row)[octet], x);
    quantize_octet<Fp8>(x, false, nullptr, nullptr, octet);
    const int place = fragment_place<DSUF_INTER>(octet);
    if (item < 8 * kOctets)
      to[place / 4 * 32 + pair * 4 + place % 4] = row ? pack_fragment(x) : make_uint4(0, 0, 0, 0);
  }
}

// One tile's results of up to eight pairs, where a warp has the whole contraction; row_of(i) as in quantize_rows.
template <class RowOf>
__device__ __forceinline__ void store_tile(const float (&total)[4], int first, RowOf row_of) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int output = first + threadIdx.x % 32 / 4 + c / 2 * 8;
    uint16_t* row = row_of(threadIdx.x % 4 * 2 + c % 2);
    if (row && output < DSUF_DIM) row[output] = bf16_bits(__fmul_rn(total[c], kWidenScale));
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

// Up to 8 * kTiles pairs from `at` on, all tiles of the block; `share` has the weights of the first tile.
template <int kTiles>
__device__ __forceinline__ void serve(const ExpertsDown& p, Share share, uint4 (*rows)[8 * kOctets], int at, int stop,
                                      int64_t expert) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    if (at + i * 8 < stop)
      quantize_rows(rows[i], [&](int pair) {
        return at + i * 8 + pair < stop ? p.inner + int64_t(p.order[at + i * 8 + pair]) * DSUF_INTER : nullptr;
      });
  __syncthreads();
  const uint4* x[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) x[i] = at + i * 8 < stop ? rows[i] + threadIdx.x % 32 : nullptr;
#pragma unroll
  for (int each = 0; each < kEach; ++each) {
    Share next;
    if (each + 1 < kEach) load_tile(p, next, expert, each + 1);
    float total[kTiles][4] = {};
    share.template multiply<32, kTiles>(total, x, threadIdx.x / 32 % kSplit);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (at + i * 8 >= stop) break;
      store_results(total[i], first_output(each), [&](int pair) {
        return at + i * 8 + pair < stop ? p.out + int64_t(p.order[at + i * 8 + pair]) * DSUF_DIM : nullptr;
      });
    }
    if (each + 1 < kEach) share = next;
  }
}

// The shared expert on the 32 rows of the block.
__device__ __forceinline__ void serve_shared(const ExpertsDown& p, uint4* rows) {
  const int lane = threadIdx.x % 32, live = min(*p.live, p.rows), stop = min(live, int(blockIdx.y + 1) * 32);
  for (int row0 = blockIdx.y * 32; row0 < stop; row0 += 8) {
    __syncthreads();
    quantize_rows(rows, [&](int i) {
      return row0 + i < live ? p.shared_inner + int64_t(row0 + i) * DSUF_INTER : nullptr;
    });
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

extern "C" __global__ void __launch_bounds__(256, 2) experts_down(const dsuf::ExpertsDown p) {
  using namespace dsuf;
  await_inputs();
  static_assert(DSUF_DIM % 16 == 0 && DSUF_INTER % 32 == 0, "tiles and groups are whole");
  __shared__ uint4 rows[kMostTiles][8 * kOctets];
  const int slot = int(blockIdx.y) - (p.rows + 31) / 32;
  if (slot < 0) return serve_shared(p, rows[0]);
  const int used = *p.used, expert = p.expert[slot], begin = p.first[slot], stop = p.first[slot + 1];
  if (slot >= used) return;
  Share share;
  load_tile(p, share, expert, 0);
  if (stop - begin <= 8) return serve<1>(p, share, rows, begin, stop, expert);
  for (int at = begin; at < stop; at += 8 * kMostTiles) serve<kMostTiles>(p, share, rows, at, stop, expert);
}

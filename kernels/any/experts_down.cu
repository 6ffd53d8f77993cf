// The second half of the routed experts: out = bf16(w2 fp8(inner)), a row for every (row, pick) pair.
//
// Shapes: ExpertsDown; rows of weights 16-byte aligned; dim a multiple of 16. A block quantises the rows that it needs,
// 32 values a scale, and keeps in shared memory what the codes mean. Pairs and order of sums as in experts_up. Where
// warps share no contraction (kSplitOf) each has kEach tiles of sixteen outputs, one after the other, the next one's
// weights on their way. Grid: (ceil(dim / 16 / tiles of a block), slots), slots >= distinct experts. Padding is never
// routed. Bound: bytes, dim * inter * 17 / 32 an expert in use.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"

namespace dsuf {

constexpr int kSplit = kSplitOf<DSUF_INTER>, kAbreast = 8 / kSplit, kEach = kSplit == 1 ? 2 : 1;
constexpr int kMostTiles = DSUF_INTER <= 640 ? 4 : 1, kOctets = DSUF_INTER / 8;
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

// What the quantised rows of eight pairs from `at` on mean, as multiply takes them: lane after lane; zeros past `stop`.
__device__ __forceinline__ void quantize_pairs(const ExpertsDown& p, uint4* to, int at, int stop) {
  for (int from = 0; from < 8 * kOctets; from += 256) {
    const int item = from + threadIdx.x, pair = item / kOctets, octet = item % kOctets;
    const bool inside = item < 8 * kOctets && at + pair < stop;
    float x[8] = {};
    if (inside)
      unpack_bf16x8(reinterpret_cast<const uint4*>(p.inner + int64_t(p.order[at + pair]) * DSUF_INTER)[octet], x);
    quantize_octet<Fp8>(x, false, nullptr, nullptr, octet);
    const int place = fragment_place<DSUF_INTER>(octet);
    if (item < 8 * kOctets)
      to[place / 4 * 32 + pair * 4 + place % 4] = inside ? pack_fragment(x) : make_uint4(0, 0, 0, 0);
  }
}

// One result of eight pairs from `from` on, where a warp has the whole contraction.
__device__ __forceinline__ void store_tile(const ExpertsDown& p, const float (&total)[4], int from, int stop,
                                           int first) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int place = from + threadIdx.x % 4 * 2 + c % 2, output = first + threadIdx.x % 32 / 4 + c / 2 * 8;
    if (place < stop && output < DSUF_DIM)
      p.out[int64_t(p.order[place]) * DSUF_DIM + output] = bf16_bits(__fmul_rn(total[c], kWidenScale));
  }
}

// The same where warps share it.
__device__ __forceinline__ void store_sums(const ExpertsDown& p, const float (&total)[4], int from, int stop) {
  __shared__ TileSums<kSplit> sums;
  __syncthreads();
  sums.put(total);
  __syncthreads();
  for (int e = threadIdx.x; e < min(stop - from, 8) * kAbreast * 16; e += 256) {
    const int column = e % (kAbreast * 16), place = e / (kAbreast * 16), output = blockIdx.x * kAbreast * 16 + column;
    if (output < DSUF_DIM)
      p.out[int64_t(p.order[from + place]) * DSUF_DIM + output] = bf16_bits(sums.sum(column / 16, column % 16, place));
  }
}

// Up to 8 * kTiles pairs from `at` on, all tiles of the block; `share` has the weights of the first tile.
template <int kTiles>
__device__ __forceinline__ void serve(const ExpertsDown& p, Share share, uint4 (*rows)[8 * kOctets], int at, int stop,
                                      int64_t expert) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    if (at + i * 8 < stop) quantize_pairs(p, rows[i], at + i * 8, stop);
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
      if constexpr (kSplit == 1) {
        store_tile(p, total[i], at + i * 8, stop, first_output(each));
      } else {
        store_sums(p, total[i], at + i * 8, stop);
      }
    }
    if (each + 1 < kEach) share = next;
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256, 2) experts_down(const dsuf::ExpertsDown p) {
  using namespace dsuf;
  await_inputs();
  static_assert(DSUF_DIM % 16 == 0 && DSUF_INTER % 32 == 0, "tiles and groups are whole");
  __shared__ uint4 rows[kMostTiles][8 * kOctets];
  const int slot = blockIdx.y, used = *p.used, expert = p.expert[slot], begin = p.first[slot];
  const int stop = p.first[slot + 1];
  if (slot >= used) return;
  Share share;
  load_tile(p, share, expert, 0);
  if (stop - begin <= 8) return serve<1>(p, share, rows, begin, stop, expert);
  for (int at = begin; at < stop; at += 8 * kMostTiles) serve<kMostTiles>(p, share, rows, at, stop, expert);
}

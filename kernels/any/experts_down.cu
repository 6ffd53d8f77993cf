// The second half of the routed experts: out = bf16(w2 inner), a row for every (row, pick) pair.
//
// Shapes: ExpertsDown; alignment, order of sums and padding as in experts_up; dim a multiple of 16. A block has as many
// tiles of sixteen outputs as warps are not needed to share a contraction (kSplitOf). Grid: (ceil(dim / 16 / tiles),
// slots). Bound: bytes, dim * inter * 17 / 32 an expert in use.
#include "contract.h"
#include "experts.cuh"

namespace dsuf {

constexpr int kSplit = kSplitOf<DSUF_INTER>, kOutputs = 16 * (8 / kSplit), kGroups = DSUF_INTER / 32;

// Pairs from `at` on, at most eight times kTiles of them, by one pass over the weights.
template <int kTiles>
__device__ __forceinline__ void serve(const ExpertsDown& p, int64_t row, int first, bool inside, int at, int stop) {
  __shared__ TileSums<kSplit, kTiles> sums;
  const int lane = threadIdx.x % 32;
  PairTile tile[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int own = at + t * 8 + lane / 4, even = at + t * 8 + lane % 4 * 2;
    tile[t].x = own < stop ? p.codes + int64_t(p.order[own]) * DSUF_INTER + lane % 4 * 8 : nullptr;
    tile[t].even_scale = even < stop ? p.scales + int64_t(p.order[even]) * kGroups : nullptr;
    tile[t].odd_scale = even + 1 < stop ? p.scales + int64_t(p.order[even + 1]) * kGroups : nullptr;
  }
  float total[1][kTiles][4] = {};
  const uint8_t* const low[1] = {p.w2 + row * (DSUF_INTER / 2) + lane % 4 * 4};
  const uint8_t* const scale[1] = {p.w2_scale + row * kGroups};
  if (inside) multiply_fp4<DSUF_INTER, kSplit, 1, kTiles>(total, low, scale, tile, threadIdx.x / 32 % kSplit);
  __syncthreads();
  sums.put(total[0]);
  __syncthreads();
  for (int e = threadIdx.x; e < min(stop - at, 8 * kTiles) * kOutputs; e += 256) {
    const int column = e % kOutputs, pair = e / kOutputs;
    if (first + column < DSUF_DIM)
      p.out[int64_t(p.order[at + pair]) * DSUF_DIM + first + column] = bf16_bits(sums.sum(column, pair));
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256, 4) experts_down(const dsuf::ExpertsDown p) {
  using namespace dsuf;
  static_assert(DSUF_DIM % 16 == 0, "a tile has sixteen outputs");
  const int slot = blockIdx.y, first = blockIdx.x * kOutputs, own = first + threadIdx.x / 32 / kSplit * 16;
  if (slot >= *p.used) return;
  const bool inside = own < DSUF_DIM;
  const int64_t row = int64_t(p.expert[slot]) * DSUF_DIM + (inside ? own : 0) + threadIdx.x % 32 / 4;
  for (int at = p.first[slot], stop = p.first[slot + 1]; at < stop;) {
    if (stop - at > 8) {
      serve<2>(p, row, first, inside, at, stop);
      at += 16;
    } else {
      serve<1>(p, row, first, inside, at, stop);
      at += 8;
    }
  }
}

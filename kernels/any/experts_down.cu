// The second half of the routed experts: out = bf16(w2 inner), a row for every (row, pick) pair.
//
// Shapes: ExpertsDown; alignment, order of sums and padding as in experts_up; dim a multiple of 16. A block has as many
// tiles of sixteen outputs as warps are not needed to share a contraction (kSplitOf). Grid: (ceil(dim / 16 / tiles),
// slots). Bound: bytes, dim * inter * 17 / 32 an expert in use.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) experts_down(const dsuf::ExpertsDown p) {
  using namespace dsuf;
  await_inputs();
  static_assert(DSUF_DIM % 16 == 0, "a tile has sixteen outputs");
  constexpr int kSplit = kSplitOf<DSUF_INTER>, kOutputs = 16 * (8 / kSplit), kGroups = DSUF_INTER / 32;
  __shared__ TileSums<kSplit> sums;
  const int slot = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * kOutputs;
  if (slot >= *p.used) return;
  const int own = first + warp / kSplit * 16;
  const bool inside = own < DSUF_DIM;
  const int64_t output = int64_t(p.expert[slot]) * DSUF_DIM + (inside ? own : 0) + lane / 4;
  const uint8_t* const low[1] = {p.w2 + output * (DSUF_INTER / 2) + lane % 4 * 4};
  const uint8_t* const scale[1] = {p.w2_scale + output * kGroups};
  for (int at = p.first[slot], stop = p.first[slot + 1]; at < stop; at += 8) {
    const int mine = at + lane / 4, even = at + lane % 4 * 2;
    PairTile tile = {};
    if (mine < stop) tile.x = p.codes + int64_t(p.order[mine]) * DSUF_INTER + lane % 4 * 8;
    if (even < stop) tile.even_scale = p.scales + int64_t(p.order[even]) * kGroups;
    if (even + 1 < stop) tile.odd_scale = p.scales + int64_t(p.order[even + 1]) * kGroups;
    float total[1][4] = {};
    if (inside) multiply_fp4<DSUF_INTER, kSplit, 1>(total, low, scale, tile, warp % kSplit);
    __syncthreads();
    sums.put(total[0]);
    __syncthreads();
    for (int e = threadIdx.x; e < min(stop - at, 8) * kOutputs; e += 256) {
      const int column = e % kOutputs, pair = e / kOutputs;
      if (first + column < DSUF_DIM)
        p.out[int64_t(p.order[at + pair]) * DSUF_DIM + first + column] = bf16_bits(sums.sum(column, pair));
    }
  }
}

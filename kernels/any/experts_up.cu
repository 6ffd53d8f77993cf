// The first half of the routed experts: both FP4 projections, SwiGLU, and the routing weight.
//
//   a = bf16(w1 x), b = bf16(w3 x);   inner = bf16(silu(min(a, limit)) * clamp(b, limit) * weight)
//
// Shapes: ExpertsUp; rows of codes 8-byte, of weights 4-byte aligned; inter a multiple of 16. The pairs of an expert
// are taken eight at a time. FP4 weights are widened to E4M3 for the tensor cores. Warps that share a contraction take
// runs of it in turn and are added in order: a pair's result depends on nothing but its row. A block has as many tiles
// of sixteen outputs as warps are not needed to share one (kSplitOf). Grid: (ceil(inter / 16 / tiles), slots), slots >=
// distinct experts. Padding is never routed.
// Bound: bytes, 2 * inter * dim * 17 / 32 an expert in use.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256, 3) experts_up(const dsuf::ExpertsUp p) {
  using namespace dsuf;
  await_inputs();
  static_assert(DSUF_INTER % 16 == 0, "a tile has sixteen outputs");
  constexpr int kSplit = kSplitOf<DSUF_DIM>, kOutputs = 16 * (8 / kSplit), kGroups = DSUF_DIM / 32;
  __shared__ TileSums<kSplit> gates, ups;
  const int slot = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * kOutputs;
  if (slot >= *p.used) return;
  const int own = first + warp / kSplit * 16;
  const bool inside = own < DSUF_INTER;
  const int64_t output = int64_t(p.expert[slot]) * DSUF_INTER + (inside ? own : 0) + lane / 4;
  const int64_t offset = output * (DSUF_DIM / 2) + lane % 4 * 4;
  const uint8_t* const low[2] = {p.w1 + offset, p.w3 + offset};
  const uint8_t* const scale[2] = {p.w1_scale + output * kGroups, p.w3_scale + output * kGroups};
  for (int at = p.first[slot], stop = p.first[slot + 1]; at < stop; at += 8) {
    const int mine = at + lane / 4, even = at + lane % 4 * 2;
    PairTile tile = {};
    if (mine < stop) tile.x = p.codes + int64_t(p.order[mine] / p.picks) * DSUF_DIM + lane % 4 * 8;
    if (even < stop) tile.even_scale = p.scales + int64_t(p.order[even] / p.picks) * kGroups;
    if (even + 1 < stop) tile.odd_scale = p.scales + int64_t(p.order[even + 1] / p.picks) * kGroups;
    float total[2][4] = {};
    if (inside) multiply_fp4<DSUF_DIM, kSplit, 2>(total, low, scale, tile, warp % kSplit);
    __syncthreads();
    gates.put(total[0]);
    ups.put(total[1]);
    __syncthreads();
    for (int e = threadIdx.x; e < min(stop - at, 8) * kOutputs; e += 256) {
      const int column = e % kOutputs, place = e / kOutputs, pair = p.order[at + place];
      if (first + column >= DSUF_INTER) continue;
      const float a = round_bf16(gates.sum(column, place)), b = round_bf16(ups.sum(column, place));
      p.inner[int64_t(pair) * DSUF_INTER + first + column] = bf16_bits(__fmul_rn(swiglu(a, b), p.weights[pair]));
    }
  }
}

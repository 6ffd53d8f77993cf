// The first half of the routed experts: both FP4 projections, SwiGLU, and the routing weight.
//
//   a = bf16(w1 x), b = bf16(w3 x);   inner = bf16(silu(min(a, limit)) * clamp(b, limit) * weight)
//
// Shapes: ExpertsUp; rows of codes 8-byte, of weights 4-byte aligned; inter a multiple of 16. A pass over an expert's
// weights serves eight of its pairs, or sixteen where there are more. Warps that share a contraction take runs of it in
// turn and are added in order: a pair's result depends on nothing but its row. A block has as many tiles of sixteen
// outputs as warps are not needed to share one (kSplitOf). Grid: (ceil(inter / 16 / tiles), slots), slots >= distinct
// experts. Padding is never routed. Products of E4M3 on the tensor cores, FP4 weights widened to it.
// Bound: bytes, 2 * inter * dim * 17 / 32 an expert in use.
#include "contract.h"
#include "experts.cuh"

namespace dsuf {

constexpr int kSplit = kSplitOf<DSUF_DIM>, kOutputs = 16 * (8 / kSplit), kGroups = DSUF_DIM / 32;

// Pairs from `at` on, at most eight times kTiles of them, by one pass over the weights.
template <int kTiles>
__device__ __forceinline__ void serve(const ExpertsUp& p, int64_t row, int first, bool inside, int at, int stop) {
  __shared__ TileSums<kSplit, kTiles> gates, ups;
  const int lane = threadIdx.x % 32;
  PairTile tile[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int own = at + t * 8 + lane / 4, even = at + t * 8 + lane % 4 * 2;
    tile[t].x = own < stop ? p.codes + int64_t(p.order[own] / p.picks) * DSUF_DIM + lane % 4 * 8 : nullptr;
    tile[t].even_scale = even < stop ? p.scales + int64_t(p.order[even] / p.picks) * kGroups : nullptr;
    tile[t].odd_scale = even + 1 < stop ? p.scales + int64_t(p.order[even + 1] / p.picks) * kGroups : nullptr;
  }
  float total[2][kTiles][4] = {};
  const int64_t offset = row * (DSUF_DIM / 2) + lane % 4 * 4;
  const uint8_t* const low[2] = {p.w1 + offset, p.w3 + offset};
  const uint8_t* const scale[2] = {p.w1_scale + row * kGroups, p.w3_scale + row * kGroups};
  if (inside) multiply_fp4<DSUF_DIM, kSplit, 2, kTiles>(total, low, scale, tile, threadIdx.x / 32 % kSplit);
  __syncthreads();
  gates.put(total[0]);
  ups.put(total[1]);
  __syncthreads();
  for (int e = threadIdx.x; e < min(stop - at, 8 * kTiles) * kOutputs; e += 256) {
    const int column = e % kOutputs, place = e / kOutputs, pair = p.order[at + place];
    if (first + column >= DSUF_INTER) continue;
    const float a = round_bf16(gates.sum(column, place)), b = round_bf16(ups.sum(column, place));
    p.inner[int64_t(pair) * DSUF_INTER + first + column] = bf16_bits(__fmul_rn(swiglu(a, b), p.weights[pair]));
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256, 3) experts_up(const dsuf::ExpertsUp p) {
  using namespace dsuf;
  static_assert(DSUF_INTER % 16 == 0, "a tile has sixteen outputs");
  const int slot = blockIdx.y, first = blockIdx.x * kOutputs, own = first + threadIdx.x / 32 / kSplit * 16;
  if (slot >= *p.used) return;
  const bool inside = own < DSUF_INTER;
  const int64_t row = int64_t(p.expert[slot]) * DSUF_INTER + (inside ? own : 0) + threadIdx.x % 32 / 4;
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

// The first half of the experts: both projections, SwiGLU, and for routed ones the routing weight. Routed experts have
// FP4 weights, the shared one has FP8 weights.
//
//   a = bf16(w1 x), b = bf16(w3 x);   inner = bf16(silu(min(a, limit)) * clamp(b, limit) * weight)
//
// Shapes: ExpertsUp; x are what the FP8 codes of the input mean, in the order of fragment.cuh; rows of weights 16-byte
// aligned; inter a multiple of 32. A tile of sixteen rows of weights is eight outputs of both matrices. Pairs are taken
// eight at a time, or sixteen where an expert has more. Warps that share a contraction take runs of it (kSplitOf) and are
// added in order: a pair's result depends on nothing but its row. Grid: (ceil(inter / 8 / tiles), ceil(rows / 32) +
// slots): 32 rows of the shared expert, then an expert each, slots >= distinct experts. Padding is never routed, and its
// rows of the shared expert stay as they are. Bound: bytes, 2 * inter * dim * 17 / 32 an expert in use.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"
#include "shared_expert.cuh"

namespace dsuf {

constexpr int kSplit = kSplitOf<DSUF_DIM>, kTilesOfBlock = 8 / kSplit, kOutputs = 8 * kTilesOfBlock, kMost = 16;
using Tile = Fp4Tile<DSUF_DIM, kSplit>;

// What a block knows of its pairs.
struct Pairs {
  int pair[kMost];
  float weight[kMost];
};

// Pairs `at` and on, up to 8 * kTiles of them; what is copied may still be on its way.
template <int kTiles>
__device__ __forceinline__ void serve(const ExpertsUp& p, const Tile& tile, Pairs& pairs, TileSums<kSplit>& sums,
                                      int at, int stop, bool inside) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * kOutputs;
  __syncthreads();
  if (threadIdx.x < 8 * kTiles) {
    const int pair = p.order[min(at + int(threadIdx.x), stop - 1)];
    pairs.pair[threadIdx.x] = pair;
    pairs.weight[threadIdx.x] = p.weights[pair];
  }
  __syncthreads();
  const uint4* x[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    x[i] = reinterpret_cast<const uint4*>(p.x + int64_t(pairs.pair[i * 8 + lane / 4] / p.picks) * DSUF_DIM) + lane % 4;
  // The quad's part of the pair's row, while weights are on their way; of more rows there would be too many at once.
  if constexpr (kTiles == 1)
    for (int t = 0; t < Tile::kTurns; t += 2)
      if (const int chunk = warp % kSplit * Tile::kTurns + t + lane % 4 / 2; chunk < Tile::kChunks)
        touch(x[0] + chunk * 16 + lane % 2 * 8 - lane % 4);
  await_batches(Tile::kBatches - 1);
  __syncthreads();
  float total[kTiles][4] = {};
  if (inside) tile.template multiply<4, kTiles>(total, x, warp % kSplit);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int from = at + i * 8;
    if (from >= stop) break;
    if (i) __syncthreads();
    sums.put(total[i]);
    __syncthreads();
    for (int e = threadIdx.x; e < min(stop - from, 8) * kOutputs; e += 256) {
      const int column = e % kOutputs, place = e / kOutputs;
      if (first + column >= DSUF_INTER) continue;
      const float a = round_bf16(sums.sum(column / 8, column % 8, place));
      const float b = round_bf16(sums.sum(column / 8, column % 8 + 8, place));
      p.inner[int64_t(pairs.pair[i * 8 + place]) * DSUF_INTER + first + column] =
          bf16_bits(__fmul_rn(swiglu(a, b), pairs.weight[i * 8 + place]));
    }
  }
}

// The shared expert on the 32 rows of the block.
__device__ __forceinline__ void serve_shared(const ExpertsUp& p, TileSums<kSplit>& sums, int own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * kOutputs;
  const int low = (own < DSUF_INTER ? own : 0) + lane / 4, live = min(early_live(p.live), p.rows);
  const SharedShare<DSUF_DIM, kSplit> share = {p.shared + int64_t(low) * DSUF_DIM,
                                               p.shared_scale + low / 32 * (DSUF_DIM / 32), DSUF_INTER * DSUF_DIM,
                                               DSUF_INTER / 32 * (DSUF_DIM / 32)};
  for (int row0 = blockIdx.y * 32; row0 < min(live, int(blockIdx.y + 1) * 32); row0 += 8) {
    const int row = row0 + lane / 4;
    float total[4] = {};
    share.template multiply<4>(
        total, row < live ? reinterpret_cast<const uint4*>(p.x + int64_t(row) * DSUF_DIM) : nullptr, warp % kSplit);
    __syncthreads();
    sums.put(total);
    __syncthreads();
    for (int e = threadIdx.x; e < min(live - row0, 8) * kOutputs; e += 256) {
      const int column = e % kOutputs, place = e / kOutputs;
      if (first + column >= DSUF_INTER) continue;
      const float a = round_bf16(sums.sum(column / 8, column % 8, place));
      const float b = round_bf16(sums.sum(column / 8, column % 8 + 8, place));
      p.shared_inner[int64_t(row0 + place) * DSUF_INTER + first + column] = bf16_bits(swiglu(a, b));
    }
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256, 4) experts_up(const dsuf::ExpertsUp p) {
  using namespace dsuf;
  extern __shared__ __align__(16) uint8_t staged[];
  static_assert(DSUF_INTER % 32 == 0, "tiles are whole");
  __shared__ TileSums<kSplit> sums;
  __shared__ Pairs pairs;
  const int ahead = (p.rows + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own = (blockIdx.x * kTilesOfBlock + warp / kSplit) * 8, slot = int(blockIdx.y) - ahead;
  // The shared expert's input was there before the router, behind which the launch ahead waits before it lets this start.
  if (slot < 0) return serve_shared(p, sums, own);
  await_inputs_first();
  const bool inside = own < DSUF_INTER;
  const int used = *p.used, expert = p.expert[slot], begin = p.first[slot], stop = p.first[slot + 1];
  if (slot >= used) return;
  const int64_t output = int64_t(expert) * DSUF_INTER + (inside ? own : 0), row = (output + lane / 4) * (DSUF_DIM / 2);
  Tile& tile = reinterpret_cast<Tile*>(staged)[warp / kSplit];
  tile.load(p.w1 + row, p.w3 + row, p.w1_scale + output * (DSUF_DIM / 32), p.w3_scale + output * (DSUF_DIM / 32),
            warp % kSplit);
  for (int at = begin; at < stop; at += kMost)
    stop - at > 8 ? serve<2>(p, tile, pairs, sums, at, stop, inside) : serve<1>(p, tile, pairs, sums, at, stop, inside);
}

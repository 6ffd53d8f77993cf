// The choice of experts of up to eight rows from what score_input has left, and their pairs by expert, as route_experts
// has them; by one block, so that nothing goes through memory on the way.
//
//   chosen = the best of biased, in ascending order, ties to the lower id;
//   weights[i] = score[chosen[i]] / (sum of chosen scores + 1e-20) * route_scale
//
// Shapes: ChooseFew; rows <= 8, rows * picks <= 64, picks <= 32, picks <= experts <= 512. A warp takes a row, sixteen experts a lane;
// the best of its lanes' best is the next choice. Grid: (1, 1), 256 threads. The launch behind may count on all ahead of
// this one. Padding: chosen -1, weights 0. Bound: latency; 8 bytes an expert and row.
#include "contract.h"
#include "launch.cuh"
#include "route.cuh"

namespace dsuf {

constexpr int kEach = 16, kMostPairs = 64;

// Keys and scores of row number `row` that a lane of its warp has.
struct Rated {
  uint32_t keys[kEach];
  float scores[kEach];

  __device__ __forceinline__ void load(const ChooseFew& p, int row) {
    const int lane = threadIdx.x % 32;
    float biased[kEach];
    // All loads at once, past the end the last one's again: with a condition each would be waited for.
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = row * p.experts + min(i * 32 + lane, p.experts - 1);
      biased[i] = __ldcg(p.biased + at);
      scores[i] = __ldcg(p.scores + at);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = i * 32 + lane < p.experts ? max(sort_bits(biased[i]), 1u) : 0;
  }

  // The best that is left, and its score where it is the lane's own.
  __device__ __forceinline__ uint32_t take(float& score) {
    const int lane = threadIdx.x % 32;
    uint32_t own = keys[0], turn = 0, whose;
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (keys[i] > own) own = keys[i], turn = i;
    find_best(own, turn * 32 + lane, whose);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (whose == i * 32 + lane) keys[i] = 0, score = scores[i];
    return whose;
  }
};

// The row's choice, a lane a pair, to `chosen`, `weights` and its keys; of one warp.
__device__ __forceinline__ void choose_row(const ChooseFew& p, int row, uint32_t* keys) {
  const int lane = threadIdx.x % 32;
  Rated rated;
  rated.load(p, row);
  uint32_t chosen = 0xFFFFFFFFu;
  float score = 0.0f, own = 0.0f;
  // Loops, not copies: each instruction comes from a cold cache.
#pragma unroll 1
  for (int pick = 0; pick < p.picks; ++pick) {
    const uint32_t whose = rated.take(own);
    own = __shfl_sync(0xFFFFFFFFu, own, whose % 32);
    if (lane == pick) chosen = whose, score = own;
  }
  int place = 0;
#pragma unroll 1
  for (int i = 0; i < p.picks; ++i) place += __shfl_sync(0xFFFFFFFFu, chosen, i) < chosen;
  // Scores are added in the order of places.
  float sum = 0.0f;
#pragma unroll 1
  for (int i = 0; i < p.picks; ++i) {
    const uint32_t holder = __ballot_sync(0xFFFFFFFFu, lane < p.picks && place == i);
    sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFFu, score, __ffs(holder) - 1));
  }
  if (lane >= p.picks) return;
  const int pair = row * p.picks + place;
  p.chosen[pair] = int(chosen);
  p.weights[pair] = route_weight(score, sum);
  keys[pair] = key_of(int(chosen), pair);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) choose_few(const dsuf::ChooseFew p) {
  using namespace dsuf;
  __shared__ __align__(16) uint32_t keys[kMostPairs];
  __shared__ ExpertsInUse in_use;
  const int row = threadIdx.x / 32, lane = threadIdx.x % 32, live = min(early_live(p.live), p.rows);
  if (threadIdx.x < kMostPairs) keys[threadIdx.x] = kNoKey;
  __syncthreads();
  await_inputs_first();
  if (row < live) {
    choose_row(p, row, keys);
  } else if (row < p.rows && lane < p.picks) {
    p.chosen[row * p.picks + lane] = -1, p.weights[row * p.picks + lane] = 0.0f;
  }
  __syncthreads();
  group_keys<256>({p.chosen, p.used, p.expert, p.first, p.order, p.rows * p.picks, p.experts}, keys, in_use);
}

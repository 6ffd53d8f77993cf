// Choose experts: score = sqrt(softplus(logit)), the best of score + bias, weights normalised without the bias.
//
//   weights[i] = score[chosen[i]] / (sum of chosen scores + 1e-20) * route_scale
//   chosen in ascending order, ties to the lower id; then the pairs of all rows by expert (group.cuh)
//
// Shapes: RouteExperts; picks <= 32, experts <= 1024 and at least picks. A block of 512 a row: each warp finds the best
// of its experts, then one warp the best of those. The rows of a single cluster of 8 blocks tell its first block, which
// groups; of more, the block that is done last does. Grid: rows, up to whole clusters. Padding: chosen -1, weights 0.
// Bound: latency; 4 bytes an expert.
#include "cluster.cuh"
#include "contract.h"
#include "group.cuh"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

// Scores of a row's experts, and what its warps find.
struct Scores {
  float score[kMostExperts], picked[32];
  uint32_t best[kGroupWarps][33], at[kGroupWarps][33];  // sort bits of biased scores, zero: none; and whose
};

// The best key of the warp, zero where all are, and whose it is: the lowest id among equals.
__device__ __forceinline__ uint32_t find_best(uint32_t key, uint32_t id, uint32_t& whose) {
  const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, key);
  whose = __reduce_min_sync(0xFFFFFFFFu, key == most ? id : 0xFFFFFFFFu);
  return most;
}

// Scores of the experts that a thread has, and the best of its warp's, in order.
__device__ __forceinline__ void score_experts(const RouteExperts& p, int64_t row, Scores& room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t keys[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int e = i * kGroupThreads + threadIdx.x;
    if (e >= p.experts) continue;
    const float x = p.logits[row * p.experts + e];
    const float own = sqrtf(__fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x)))));
    room.score[e] = own;
    keys[i] = max(sort_bits(__fadd_rn(own, p.bias[e])), 1u);
  }
  for (int pick = 0; pick < p.picks; ++pick) {
    const int turn = keys[1] > keys[0];
    uint32_t whose;
    const uint32_t most = find_best(keys[turn], turn * kGroupThreads + threadIdx.x, whose);
    if (lane == 0) room.best[warp][pick] = most, room.at[warp][pick] = whose;
    if (whose % kGroupThreads == threadIdx.x) keys[whose / kGroupThreads] = 0;
  }
}

// Choose among the warps' best, a lane a warp; of one warp, of which the first lanes get a choice and its place.
__device__ __forceinline__ int choose(const RouteExperts& p, int64_t row, Scores& room, int& place) {
  const int lane = threadIdx.x;
  int next = 0;
  uint32_t chosen = 0xFFFFFFFFu;
  for (int pick = 0; pick < p.picks; ++pick) {
    const bool some = lane < kGroupWarps;
    uint32_t whose;
    find_best(some ? room.best[lane][next] : 0, some ? room.at[lane][next] : 0xFFFFFFFFu, whose);
    next += some && room.at[lane][next] == whose;
    if (lane == pick) chosen = whose;
  }
  place = 0;
  for (int i = 0; i < p.picks; ++i) place += __shfl_sync(0xFFFFFFFFu, chosen, i) < chosen;
  const float score = lane < p.picks ? room.score[chosen] : 0.0f;
  if (lane < p.picks) room.picked[place] = score;
  __syncwarp();
  float sum = 0.0f;
  for (int i = 0; i < p.picks; ++i) sum = __fadd_rn(sum, room.picked[i]);
  if (lane >= p.picks) return -1;
  p.chosen[row * p.picks + place] = int(chosen);
  p.weights[row * p.picks + place] = __fmul_rn(__fdiv_rn(score, __fadd_rn(sum, 1e-20f)), DSUF_ROUTE_SCALE);
  return int(chosen);
}

// Whether this block is the last of the launch to come here; what the others wrote before can then be read.
__device__ bool comes_last(int32_t* arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1) == int(gridDim.x) - 1;
    if (last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) route_experts(const dsuf::RouteExperts p) {
  using namespace dsuf;
  await_inputs_first();
  __shared__ union Room {
    Scores scores;
    GroupRoom groups;
  } room;
  __shared__ __align__(16) uint32_t keys[kClusterBlocks * 32];  // of the first block: what the others tell it
  __shared__ uint32_t in_use[kMostExperts / 32];
  const int64_t row = blockIdx.x;
  const bool alone = p.used && gridDim.x == kClusterBlocks;
  if (alone) cluster_start();
  int expert = -1, place = threadIdx.x;
  if (row < min(*p.live, p.rows)) {
    score_experts(p, row, room.scores);
    __syncthreads();
    if (threadIdx.x < 32) expert = choose(p, row, room.scores, place);
  } else if (row < p.rows && threadIdx.x < p.picks) {
    p.chosen[row * p.picks + place] = -1, p.weights[row * p.picks + place] = 0.0f;
  }
  const Groups groups = {p.chosen, p.used, p.expert, p.first, p.order, p.rows * p.picks, p.experts};
  if (alone) {
    __syncwarp();
    cluster_started();
    // Rows that are not there fill the keys up.
    const int pair = int(row) * p.picks + place;
    if (threadIdx.x < p.picks) *of_block(keys + pair, 0) = key_of(expert, pair);
    cluster_sync();
    if (cluster_rank() == 0) group_keys(groups, keys, in_use);
  } else if (p.used && comes_last(p.arrived)) {
    group(groups, room.groups);
  }
}

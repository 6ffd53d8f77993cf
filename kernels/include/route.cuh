// The choice of experts for a row from the router's logits, by one block.
//
//   score = sqrt(softplus(logit)), the best of score + bias, weights normalised without the bias
#pragma once
#include "group.cuh"
#include "numeric.cuh"

namespace dsuf {

// Scores of a row's experts, and what its warps find; for a block of kThreads.
template <int kThreads>
struct Scores {
  static constexpr int kWarps = kThreads / 32, kEach = kMostExperts / kThreads;
  float score[kMostExperts], picked[32];
  uint32_t best[kWarps][33], at[kWarps][33];  // sort bits of biased scores, zero: none; and whose
};

__device__ __forceinline__ float route_score(float logit) {
  return sqrtf(__fadd_rn(fmaxf(logit, 0.0f), log1pf(expf(-fabsf(logit)))));
}

// The weight of a chosen expert, of the sum of its row's scores.
__device__ __forceinline__ float route_weight(float score, float sum) {
  return __fmul_rn(__fdiv_rn(score, __fadd_rn(sum, 1e-20f)), DSUF_ROUTE_SCALE);
}

// The best key of the warp, zero where all are, and whose it is: the lowest id among equals.
__device__ __forceinline__ uint32_t find_best(uint32_t key, uint32_t id, uint32_t& whose) {
  const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, key);
  whose = __reduce_min_sync(0xFFFFFFFFu, key == most ? id : 0xFFFFFFFFu);
  return most;
}

// Scores of the experts that a thread has, and the best of its warp's, in order.
template <int kThreads, class Params>
__device__ __forceinline__ void score_experts(const Params& p, int64_t row, Scores<kThreads>& room) {
  constexpr int kEach = Scores<kThreads>::kEach;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t keys[kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * kThreads + threadIdx.x;
    if (e >= p.experts) continue;
    const float own = route_score(__ldcg(p.logits + row * p.experts + e));
    room.score[e] = own;
    keys[i] = max(sort_bits(__fadd_rn(own, p.bias[e])), 1u);
  }
  for (int pick = 0; pick < p.picks; ++pick) {
    uint32_t own = keys[0], turn = 0, whose;
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (keys[i] > own) own = keys[i], turn = i;
    const uint32_t most = find_best(own, turn * kThreads + threadIdx.x, whose);
    if (lane == 0) room.best[warp][pick] = most, room.at[warp][pick] = whose;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (whose == i * kThreads + threadIdx.x) keys[i] = 0;
  }
}

// Choose among the warps' best, a lane a warp; of one warp, of which the first lanes get a choice and its place.
template <int kThreads, class Params>
__device__ __forceinline__ int choose(const Params& p, int64_t row, Scores<kThreads>& room, int& place) {
  const int lane = threadIdx.x;
  int next = 0;
  uint32_t chosen = 0xFFFFFFFFu;
  for (int pick = 0; pick < p.picks; ++pick) {
    const bool some = lane < Scores<kThreads>::kWarps;
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
  p.weights[row * p.picks + place] = route_weight(score, sum);
  return int(chosen);
}

// Whether this block is the last of `count` to come here; what the others wrote before can then be read.
__device__ __forceinline__ bool comes_last(int32_t* arrived, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1) == count - 1;
    if (last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace dsuf

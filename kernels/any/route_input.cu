// The router and the choice of experts in one launch, for up to eight rows: project_bf16_few, then route_experts.
//
//   logits = float32(weight x); chosen and weights as route_experts has them; then the pairs of all rows by expert
//
// Shapes: RouteInput; rows <= 8, experts <= 1024. A cluster of eight blocks of 128 has sixteen experts, and a block's rank
// in it is the row that it adds up. Of the blocks of one rank the one that is done last chooses for the row; the row that
// is done last groups. `arrived` is zero between launches. Padding: chosen -1, weights 0. Bound: the weights' bytes,
// 2 * experts * dim, and latency.
#include "contract.h"
#include "few.cuh"
#include "route.cuh"

namespace dsuf {
constexpr int kThreads = 32 * kFewWarps, kMostPairs = kFewBlocks * 32;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128) route_input(const dsuf::RouteInput p) {
  using namespace dsuf;
  __shared__ FewSum sums;
  __shared__ union Room {
    Scores<kThreads> scores;
    struct {
      alignas(16) uint32_t keys[kMostPairs];
      uint32_t in_use[kMostExperts / 32];
    } groups;
  } room;
  const int first = blockIdx.x / kFewBlocks * 16, expert = first + threadIdx.x, row = cluster_rank();
  const int live = multiply_few<DSUF_DIM, true>(sums, p.x, p.weight, p.experts, first, 0, p.live, p.rows);
  if (row >= p.rows) return;
  if (threadIdx.x < 16 && expert < p.experts) p.logits[row * p.experts + expert] = sums.sum(0, 0, threadIdx.x);
  if (!comes_last(p.arrived + row, gridDim.x / kFewBlocks)) return;
  if (row < live) {
    score_experts(p, row, room.scores);
    __syncthreads();
    int place;
    if (threadIdx.x < 32) choose(p, row, room.scores, place);
  } else if (threadIdx.x < p.picks) {
    p.chosen[row * p.picks + threadIdx.x] = -1, p.weights[row * p.picks + threadIdx.x] = 0.0f;
  }
  if (!comes_last(p.arrived + kFewBlocks, p.rows)) return;
  const Groups groups = {p.chosen, p.used, p.expert, p.first, p.order, p.rows * p.picks, p.experts};
  for (int pair = threadIdx.x; pair < (groups.pairs + 3) / 4 * 4; pair += kThreads)
    room.groups.keys[pair] = key_of(groups.expert_of(pair), pair);
  group_keys<kThreads>(groups, room.groups.keys, room.groups.in_use);
}

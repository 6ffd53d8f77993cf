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
#include "route.cuh"

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) route_experts(const dsuf::RouteExperts p) {
  using namespace dsuf;
  await_inputs_first();
  __shared__ union Room {
    Scores<kGroupThreads> scores;
    GroupRoom groups;
  } room;
  __shared__ __align__(16) uint32_t keys[kClusterBlocks * 32];  // of the first block: what the others tell it
  __shared__ ExpertsInUse in_use;
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
  } else if (p.used && comes_last(p.arrived, gridDim.x)) {
    group(groups, room.groups);
  }
}

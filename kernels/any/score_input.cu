// The router for up to eight rows, and how its experts are rated.
//
//   scores = sqrt(softplus(float32(weight x)));   biased = scores + bias
//
// Shapes: ScoreInput; rows <= 8. The product as in project_bf16_few: a cluster of eight blocks of 128 has sixteen experts,
// and a block's rank in it is the row that it adds up. Padding: not written. Bound: the weights' bytes, 2 * experts * dim.
#include "contract.h"
#include "few.cuh"
#include "route.cuh"

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128) score_input(const dsuf::ScoreInput p) {
  using namespace dsuf;
  __shared__ FewSum sums;
  const int first = blockIdx.x / kFewBlocks * 16, expert = first + threadIdx.x, row = cluster_rank();
  const float bias = threadIdx.x < 16 && expert < p.experts ? p.bias[expert] : 0.0f;
  const int live = multiply_few<DSUF_DIM>(sums, p.x, p.weight, p.experts, first, 0, p.live, p.rows);
  if (row >= live || threadIdx.x >= 16 || expert >= p.experts) return;
  const float score = route_score(sums.sum(0, 0, threadIdx.x));
  p.scores[row * p.experts + expert] = score;
  p.biased[row * p.experts + expert] = __fadd_rn(score, bias);
}

// Choose experts: score = sqrt(softplus(logit)), the best of score + bias, weights normalised without the bias.
//
//   weights[i] = score[chosen[i]] / (sum of chosen scores + 1e-20) * route_scale
//   chosen in ascending order, ties to the lower id
//
// Shapes: RouteExperts; experts <= 1024, picks <= 32. A warp a row, four rows a block of 128. Padding: chosen -1,
// weights zero. Bound: latency; 4 bytes an expert.
#include "contract.h"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(128) route_experts(const dsuf::RouteExperts p) {
  __shared__ float score[4][1024];
  __shared__ bool taken[4][1024];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * 4 + warp;
  if (row >= p.rows) return;
  int32_t* chosen = p.chosen + row * p.picks;
  float* weights = p.weights + row * p.picks;
  if (row >= *p.live) {
    if (lane < p.picks) chosen[lane] = -1, weights[lane] = 0.0f;
    return;
  }
  for (int e = lane; e < p.experts; e += 32) {
    const float x = p.logits[row * p.experts + e];
    score[warp][e] = sqrtf(__fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x)))));
    taken[warp][e] = false;
  }
  __syncwarp();
  for (int pick = 0; pick < p.picks; ++pick) {
    float best = -INFINITY;
    int at = 1 << 30;
    for (int e = lane; e < p.experts; e += 32) {
      const float value = __fadd_rn(score[warp][e], p.bias[e]);
      if (!taken[warp][e] && (value > best || at == 1 << 30)) best = value, at = e;
    }
    for (int other = 16; other > 0; other /= 2) {
      const float value = __shfl_xor_sync(0xFFFFFFFFu, best, other);
      const int from = __shfl_xor_sync(0xFFFFFFFFu, at, other);
      if (from != 1 << 30 && (at == 1 << 30 || value > best || (value == best && from < at))) best = value, at = from;
    }
    if (lane == 0) taken[warp][at] = true;
    __syncwarp();
  }
  if (lane == 0) {
    int found = 0;
    float sum = 0.0f;
    for (int e = 0; e < p.experts; ++e)
      if (taken[warp][e]) chosen[found++] = e, sum = __fadd_rn(sum, score[warp][e]);
    for (int i = 0; i < found; ++i)
      weights[i] = __fmul_rn(__fdiv_rn(score[warp][chosen[i]], __fadd_rn(sum, 1e-20f)), DSUF_ROUTE_SCALE);
  }
}

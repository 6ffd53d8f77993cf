// Choose experts: score = sqrt(softplus(logit)), the best of score + bias, weights normalised without the bias.
//
//   weights[i] = score[chosen[i]] / (sum of chosen scores + 1e-20) * route_scale
//   chosen in ascending order, ties to the lower id
//
// Shapes: RouteExperts; experts <= 1024, picks <= 32. A block of 128 a row scores, then one warp chooses, a lane among
// every 32nd expert. Padding: chosen -1, weights zero. Bound: latency; 4 bytes an expert.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(128) route_experts(const dsuf::RouteExperts p) {
  using namespace dsuf;
  await_inputs();
  __shared__ float score[1024], picked[32];
  __shared__ uint32_t keys[1024];  // sort as the biased scores do
  constexpr int kEach = 32;
  const int lane = threadIdx.x;
  const int64_t row = blockIdx.x;
  int32_t* chosen = p.chosen + row * p.picks;
  float* weights = p.weights + row * p.picks;
  if (row >= *p.live) {
    if (lane < p.picks) chosen[lane] = -1, weights[lane] = 0.0f;
    return;
  }
  for (int e = threadIdx.x; e < p.experts; e += 128) {
    const float x = p.logits[row * p.experts + e];
    const float own = sqrtf(__fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x)))));
    score[e] = own;
    keys[e] = max(sort_bits(__fadd_rn(own, p.bias[e])), 1u);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  uint32_t key[kEach], taken = 0;  // zero: taken, or no expert
#pragma unroll
  for (int i = 0; i < kEach; ++i) key[i] = i * 32 + lane < p.experts ? keys[i * 32 + lane] : 0;
  for (int pick = 0; pick < p.picks; ++pick) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (key[i] > best) best = key[i], at = i;
    const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, best);
    const uint32_t id = __reduce_min_sync(0xFFFFFFFFu, best == most ? uint32_t(at * 32 + lane) : 0xFFFFFFFFu);
    if (int(id % 32) == lane) taken |= 1u << (id / 32);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (uint32_t(i * 32 + lane) == id) key[i] = 0;
  }
  int found = 0;
  for (int i = 0; i * 32 < p.experts; ++i) {
    const uint32_t here = __ballot_sync(0xFFFFFFFFu, taken >> i & 1);
    const int place = found + __popc(here & ((1u << lane) - 1));
    if (taken >> i & 1) chosen[place] = i * 32 + lane, picked[place] = score[i * 32 + lane];
    found += __popc(here);
  }
  __syncwarp();
  float sum = 0.0f;
  for (int i = 0; i < p.picks; ++i) sum = __fadd_rn(sum, picked[i]);
  if (lane < p.picks)
    weights[lane] = __fmul_rn(__fdiv_rn(picked[lane], __fadd_rn(sum, 1e-20f)), DSUF_ROUTE_SCALE);
}

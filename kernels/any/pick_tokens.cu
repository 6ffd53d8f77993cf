// Greedy choice: the largest logit of each row, the lowest id among equals.
//
// Shapes: PickTokens. A block of 1024 a row. Padding: picked -1, best zero. NaN is never picked unless all are.
// Bound: bytes, 4 a logit.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

__device__ __forceinline__ void take_better(float& best, int& at, float value, int from) {
  if (value > best || (value == best && from < at)) best = value, at = from;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(1024) pick_tokens(const dsuf::PickTokens p) {
  using namespace dsuf;
  await_inputs();
  __shared__ float value[32];
  __shared__ int place[32];
  const int64_t row = blockIdx.x;
  if (row >= *p.live) {
    if (threadIdx.x == 0) p.picked[row] = -1, p.best[row] = 0.0f;
    return;
  }
  float best = -INFINITY;
  int at = p.vocabulary - 1;
  for (int i = threadIdx.x; i < p.vocabulary; i += 1024) take_better(best, at, p.logits[row * p.vocabulary + i], i);
  for (int round = 0; round < 2; ++round) {
    for (int other = 16; other > 0; other /= 2)
      take_better(best, at, __shfl_xor_sync(0xFFFFFFFFu, best, other), __shfl_xor_sync(0xFFFFFFFFu, at, other));
    if (round == 0) {
      if (threadIdx.x % 32 == 0) value[threadIdx.x / 32] = best, place[threadIdx.x / 32] = at;
      __syncthreads();
      best = value[threadIdx.x % 32];
      at = place[threadIdx.x % 32];
    }
  }
  if (threadIdx.x == 0) p.picked[row] = at, p.best[row] = best;
}

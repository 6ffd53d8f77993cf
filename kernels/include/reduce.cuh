// Sums and maxima over a warp or a block, in an order that depends on the launch geometry alone.
#pragma once
#include <stdint.h>

namespace dsuf {

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, other);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, other));
  return x;
}

// The sum over a block of kThreads, known to all its threads. Uses a barrier before and after: safe to repeat.
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T x) {
  __shared__ T part[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  T total = part[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) total += part[i];
  return total;
}

}  // namespace dsuf

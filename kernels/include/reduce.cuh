// Sums, running sums and maxima over a warp or a block, in an order that depends on the launch geometry alone.
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

// Sums of eight numbers a lane at once: a lane gets that of x[lane / 4], over lanes in a fixed tree.
__device__ __forceinline__ float warp_sum_eight(float (&x)[8]) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = threadIdx.x & (4 * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? x[i] : x[i + half], own = upper ? x[i + half] : x[i];
      x[i] = __fadd_rn(own, __shfl_xor_sync(0xFFFFFFFFu, sent, 4 * half));
    }
  }
  x[0] = __fadd_rn(x[0], __shfl_xor_sync(0xFFFFFFFFu, x[0], 2));
  return __fadd_rn(x[0], __shfl_xor_sync(0xFFFFFFFFu, x[0], 1));
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

// The inclusive sum over the lanes up to this one.
template <class T>
__device__ __forceinline__ T warp_through(T x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(0xFFFFFFFFu, x, step);
    if (int(threadIdx.x % 32) >= step) x += before;
  }
  return x;
}

// Sum of `own` over the threads of the block before this one; `all` becomes the block's. Safe to repeat.
template <int kThreads, class T>
__device__ T block_before(T own, T& all) {
  __shared__ T part[kThreads / 32];
  const int warp = threadIdx.x / 32;
  const T through = warp_through(own);
  __syncthreads();
  if (threadIdx.x % 32 == 31) part[warp] = through;
  __syncthreads();
  T sum = through - own;
  all = T(0);
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) sum += part[i];
    all += part[i];
  }
  return sum;
}

}  // namespace dsuf

// A cluster of eight blocks that work on one row: sums, maxima and prefix sums over all their threads.
//
// Blocks see each other's shared memory, so a row takes one launch however long it is. Integers only: whatever the
// order in which blocks arrive, the result is the same. All threads of all blocks of a cluster come to each call.
#pragma once
#include "reduce.cuh"

namespace dsuf {

constexpr int kClusterBlocks = 8;

__device__ __forceinline__ int cluster_rank() { return int(__clusterRelativeBlockRank()); }

__device__ __forceinline__ void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// The same variable of block `rank`'s shared memory.
template <class T>
__device__ __forceinline__ T* of_block(T* variable, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(variable, rank));
}

// Sum of `own` over the threads of the cluster before this one; `all` becomes the cluster's. Safe to repeat.
template <int kThreads, class T>
__device__ T cluster_before(T own, T& all) {
  __shared__ T block;
  T mine;
  T sum = block_before<kThreads>(own, mine);
  if (threadIdx.x == 0) block = mine;
  cluster_sync();
  all = T(0);
  for (int rank = 0; rank < kClusterBlocks; ++rank) {
    const T theirs = *of_block(&block, rank);
    if (rank < cluster_rank()) sum += theirs;
    all += theirs;
  }
  cluster_sync();
  return sum;
}

// The largest of `own` over the cluster.
template <int kThreads>
__device__ uint64_t cluster_max(uint64_t own) {
  __shared__ uint64_t part[kThreads / 32], block;
  for (int other = 16; other > 0; other /= 2) {
    const uint64_t theirs = __shfl_xor_sync(0xFFFFFFFFu, own, other);
    own = theirs > own ? theirs : own;
  }
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / 32; ++i) own = part[i] > own ? part[i] : own;
    block = own;
  }
  cluster_sync();
  uint64_t most = 0;
  for (int rank = 0; rank < kClusterBlocks; ++rank) {
    const uint64_t theirs = *of_block(&block, rank);
    most = theirs > most ? theirs : most;
  }
  cluster_sync();
  return most;
}

// Add up over the cluster what each block has counted in bins[0 .. kBins); afterwards all blocks have the sums.
template <int kThreads, int kBins, class T>
__device__ void add_bins(T (&bins)[kBins]) {
  constexpr int kShare = kBins / kClusterBlocks;
  static_assert(kBins % kClusterBlocks == 0, "every block adds up a share");
  cluster_sync();
  for (int i = threadIdx.x; i < kShare; i += kThreads) {
    const int bin = cluster_rank() * kShare + i;
    T sum = T(0);
    for (int rank = 0; rank < kClusterBlocks; ++rank) sum += *of_block(&bins[bin], rank);
    for (int rank = 0; rank < kClusterBlocks; ++rank) *of_block(&bins[bin], rank) = sum;
  }
  cluster_sync();
}

// The bin in which the running sum from bin 0 on first passes `wanted`, and the sum before it; all threads get both.
// `wanted` is less than the sum of all. Two bins or more a thread.
template <int kThreads, int kBins, class T>
__device__ void find_bin(const T (&bins)[kBins], T wanted, int& bin, T& before) {
  constexpr int kEach = kBins / kThreads;
  static_assert(kBins % kThreads == 0, "whole turns");
  __shared__ int found;
  __shared__ T sum_found;
  T own = T(0), all;
  for (int i = 0; i < kEach; ++i) own += bins[threadIdx.x * kEach + i];
  T sum = block_before<kThreads>(own, all);
  if (sum <= wanted && wanted < sum + own) {
    int at = threadIdx.x * kEach;
    while (sum + bins[at] <= wanted) sum += bins[at++];
    found = at;
    sum_found = sum;
  }
  __syncthreads();
  bin = found;
  before = sum_found;
  __syncthreads();
}

}  // namespace dsuf

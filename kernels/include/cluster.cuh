// A cluster of eight blocks that work on one row: sums, maxima and prefix sums over all their threads.
//
// Blocks see each other's shared memory, so a row takes one launch however long it is. Integers only: whatever the
// order in which blocks arrive, the result is the same. All threads of all blocks of a cluster come to each call. A
// block tells the others by writing into their memory: to read there would take a round trip for each.
#pragma once
#include "reduce.cuh"

namespace dsuf {

constexpr int kClusterBlocks = 8;

__device__ __forceinline__ int cluster_rank() { return int(__clusterRelativeBlockRank()); }

__device__ __forceinline__ void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// Before the first write into another block: it must have begun. Between the two a block may do what is its own.
__device__ __forceinline__ void cluster_start() { __cluster_barrier_arrive(); }
__device__ __forceinline__ void cluster_started() { __cluster_barrier_wait(); }

// The same variable of block `rank`'s shared memory.
template <class T>
__device__ __forceinline__ T* of_block(T* variable, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(variable, rank));
}

// What the blocks of a cluster tell each other, one number a block and turn. Two turns have places of their own, so
// that one barrier a turn is enough.
struct Mail {
  uint64_t told[2][kClusterBlocks];
};

// Tell all blocks `own`, which the first threads of the block know; after it mail.told[turn % 2] has every block's.
__device__ __forceinline__ const uint64_t* tell_all(Mail& mail, int& turn, uint64_t own) {
  uint64_t* told = mail.told[turn++ % 2];
  if (threadIdx.x < kClusterBlocks) *of_block(told + cluster_rank(), threadIdx.x) = own;
  cluster_sync();
  return told;
}

// Sum of `own` over the threads of the cluster before this one; `all` becomes the cluster's.
template <int kThreads>
__device__ int64_t cluster_before(Mail& mail, int& turn, int64_t own, int64_t& all) {
  int64_t mine, sum = block_before<kThreads>(own, mine);
  const uint64_t* told = tell_all(mail, turn, uint64_t(mine));
  all = 0;
#pragma unroll
  for (int rank = 0; rank < kClusterBlocks; ++rank) {
    sum += rank < cluster_rank() ? int64_t(told[rank]) : 0;
    all += int64_t(told[rank]);
  }
  return sum;
}

// The first of `items` at which the running sum of of(item) passes mark_of(all), `all` being the whole sum, which the
// caller gets too: by the one lane that has it, -1 by all others and where the whole is zero. Warps take runs of items.
template <int kThreads, class Of, class Mark>
__device__ int find_passing(Mail& mail, int& turn, int items, Of of, Mark mark_of, int64_t& all) {
  constexpr int kWarps = kThreads / 32, kAtOnce = 8;
  const int lane = threadIdx.x % 32, each = (items + kClusterBlocks * kWarps - 1) / (kClusterBlocks * kWarps);
  const int warp = cluster_rank() * kWarps + int(threadIdx.x) / 32;
  const int first = min(warp * each, items), stop = min(first + each, items);
  int64_t own = 0;
#pragma unroll kAtOnce
  for (int i = first + lane; i < stop; i += 32) own += of(i);
  own = warp_sum(own);
  int64_t before = cluster_before<kThreads>(mail, turn, lane == 0 ? own : int64_t(0), all);
  before = __shfl_sync(0xFFFFFFFFu, before, 0);
  const int64_t mark = mark_of(all);
  if (all == 0 || mark < before || mark >= before + own) return -1;
  for (int base = first; base < stop; base += 32 * kAtOnce) {
    int64_t mass[kAtOnce], sum = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      mass[i] = base + 32 * i + lane < stop ? of(base + 32 * i + lane) : 0;
      sum += mass[i];
    }
    sum = warp_sum(sum);
    if (before + sum <= mark) {
      before += sum;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t through = warp_through(mass[i]);
      const uint32_t passed = __ballot_sync(0xFFFFFFFFu, before + through > mark);
      if (passed) return lane == __ffs(passed) - 1 ? base + 32 * i + lane : -1;
      before += __shfl_sync(0xFFFFFFFFu, through, 31);
    }
  }
  return -1;
}

// The largest of `own` over the cluster.
template <int kThreads>
__device__ uint64_t cluster_max(Mail& mail, int& turn, uint64_t own) {
  __shared__ uint64_t part[kThreads / 32];
  for (int other = 16; other > 0; other /= 2) {
    const uint64_t theirs = __shfl_xor_sync(0xFFFFFFFFu, own, other);
    own = theirs > own ? theirs : own;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x < kClusterBlocks)
    for (int i = 0; i < kThreads / 32; ++i) own = part[i] > own ? part[i] : own;
  const uint64_t* told = tell_all(mail, turn, own);
  uint64_t most = 0;
#pragma unroll
  for (int rank = 0; rank < kClusterBlocks; ++rank) most = told[rank] > most ? told[rank] : most;
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
    T own[kClusterBlocks], sum = T(0);
#pragma unroll
    for (int rank = 0; rank < kClusterBlocks; ++rank) own[rank] = *of_block(&bins[bin], rank);
#pragma unroll
    for (int rank = 0; rank < kClusterBlocks; ++rank) sum += own[rank];
#pragma unroll
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

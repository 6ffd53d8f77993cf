// The best of each row's scores, in ascending order of place, ties to the lower place.
//
//   select_rows  the best entries, as rows of the entry store that attend_sparse reads
//   mark_blocks  the best blocks of entries: a block is as good as its best entry, that of the newest entry always in
//
// Shapes: SelectRows, MarkBlocks; rows of scores 16-byte aligned. Scores are BF16, zero of either sign is one value. A
// cluster of 8 blocks a row, each a run of neighbours: 2048 bins by the upper 11 bits of a 16-bit distance from the
// best possible score, then 32 by the rest, find the count-th best exactly; then each block counts, and writes what it
// keeps in order. Of up to 8192 items one block does all by itself, which takes no barriers of the cluster.
// Grid: (8, rows). Padding and past the last: -1; scores past what a row may see are not read.
// Bound: bytes, 2 a score and pass (all but the first come from the cache); for few entries the launch.
#include "cluster.cuh"
#include "contract.h"
#include "launch.cuh"

namespace dsuf {

constexpr int kThreads = 512, kEach = 8, kTile = kThreads * kEach, kWorst = 0x10000;

// How far a score is from the best that there could be: smaller is better.
__device__ __forceinline__ int distance_of(uint32_t bits) {
  bits = bits == 0x8000u ? 0u : bits;
  return int(bits & 0x8000u ? bits : 0x7FFFu - bits);
}

__device__ __forceinline__ void distances_of(const uint16_t* scores, int (&distance)[8]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(scores);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) distance[i] = distance_of(words[i / 2] >> (i % 2 * 16) & 0xFFFFu);
}

// Entries of a row, and where a selected one goes.
struct Entries {
  const SelectRows& p;
  int64_t row;
  int slot, items;

  __device__ void load(int first, int (&distance)[kEach]) const {
    distances_of(p.scores + row * p.entries + first, distance);
  }
  __device__ void put(int at, int item) const {
    int entry = item;
    if (p.blocks) entry = p.blocks[row * p.block_count + item / p.block_size] * p.block_size + item % p.block_size;
    if (p.table) {
      const int shift = 31 - __clz(p.page_rows);
      entry = (p.table[int64_t(slot) * p.table_pages + (entry >> shift)] << shift) + (entry & (p.page_rows - 1));
    }
    p.selected[row * p.count + at] = entry;
  }
};

// Blocks of entries of a row.
struct Blocks {
  const MarkBlocks& p;
  int64_t row;
  int reachable, items;

  __device__ void load(int first, int (&distance)[kEach]) const {
    const uint16_t* scores = p.scores + row * p.entries;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int start = (first + i) * p.block_size, stop = min(start + p.block_size, reachable);
      int best = kWorst;
      if (p.block_size == 8 && stop - start == 8) {
        int own[8];
        distances_of(scores + start, own);
#pragma unroll
        for (int j = 0; j < 8; ++j) best = min(best, own[j]);
      } else {
        for (int at = start; at < stop; ++at) best = min(best, distance_of(scores[at]));
      }
      distance[i] = first + i == items - 1 ? -1 : best;
    }
  }
  __device__ void put(int at, int item) const { p.blocks[row * p.block_count + at] = item; }
};

constexpr int kAloneTurns = 2, kAlone = kAloneTurns * kTile;

// The run of items of this block of the cluster, in whole octets.
__device__ __forceinline__ void run_of(int items, int& first, int& stop) {
  const int each = (items + kClusterBlocks * kEach - 1) / (kClusterBlocks * kEach) * kEach;
  first = min(cluster_rank() * each, items);
  stop = min(first + each, items);
}

// Count into a bin, once for the warp where all lanes have the same.
__device__ __forceinline__ void count_bin(int* bins, int bin) {
  int same;
  __match_all_sync(0xFFFFFFFFu, bin, &same);
  if (bin < 0) return;
  if (!same)
    atomicAdd(bins + bin, 1);
  else if (threadIdx.x % 32 == 0)
    atomicAdd(bins + bin, 32);
}

// What a block counts by: the upper bits of distances, then the rest of those that agree.
struct Bins {
  int upper[2048], lower[kThreads];

  __device__ void clear() {
    for (int i = threadIdx.x; i < 2048; i += kThreads) upper[i] = 0;
    lower[threadIdx.x] = 0;
    __syncthreads();
  }
};

__device__ __forceinline__ int upper_bin(int distance) { return max(distance, 0) >> 5; }

// Shifted by one, so that the newest block's -1 has a bin of its own.
__device__ __forceinline__ int lower_bin(int distance, int upper) {
  return upper_bin(distance) == upper ? distance + 1 - upper * 32 : -1;
}

// Add up over the cluster, or go on once the block has counted.
template <bool kShared, int kBins>
__device__ __forceinline__ void finish_bins(int (&bins)[kBins]) {
  if constexpr (kShared)
    add_bins<kThreads>(bins);
  else
    __syncthreads();
}

// The distance of the wanted-th best, and how many of its equals are among the best. `count` counts all items of the
// block into bins by a function of their distance.
template <bool kShared, class Count>
__device__ int find_level(int wanted, int& equals, Count count) {
  __shared__ Bins bins;
  bins.clear();
  count(bins.upper, [](int distance) { return upper_bin(distance); });
  finish_bins<kShared>(bins.upper);
  int upper, lower, above, more;
  find_bin<kThreads>(bins.upper, wanted - 1, upper, above);
  count(bins.lower, [=](int distance) { return lower_bin(distance, upper); });
  finish_bins<kShared>(bins.lower);
  find_bin<kThreads>(bins.lower, wanted - 1 - above, lower, more);
  equals = wanted - above - more;
  return upper * 32 + lower - 1;
}

// Count an octet into bins.
template <class Bin>
__device__ __forceinline__ void count_octet(int* bins, const int (&distance)[kEach], int at, int stop, Bin bin_of) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) count_bin(bins, at + i < stop ? bin_of(distance[i]) : -1);
}

// Of an octet, how many are better and how many equal, together in one number.
__device__ __forceinline__ uint64_t count_kept(const int (&distance)[kEach], int at, int stop, int level) {
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (at + i < stop) own += uint64_t(distance[i] < level) << 32 | uint64_t(distance[i] == level);
  return own;
}

// Put those of an octet that are kept in their places, which are behind `before` better ones and equals.
template <class Source>
__device__ __forceinline__ void put_octet(const Source& source, const int (&distance)[kEach], int at, int stop,
                                          int level, int equals, uint64_t before) {
  int better = int(before >> 32), level_before = int(uint32_t(before));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (at + i >= stop || distance[i] > level) continue;
    if (distance[i] < level || level_before < equals) source.put(better + min(level_before, equals), at + i);
    better += distance[i] < level;
    level_before += distance[i] == level;
  }
}

// Put the best `wanted` of up to kAlone items, in order, by this block alone.
template <class Source>
__device__ void select_alone(const Source& source, int wanted) {
  const int stop = source.items;
  int distance[kAloneTurns][kEach], equals = 0, level = kWorst + 1;
#pragma unroll
  for (int t = 0; t < kAloneTurns; ++t)
    if (t * kTile + int(threadIdx.x) * kEach < stop) source.load(t * kTile + threadIdx.x * kEach, distance[t]);
  if (wanted < stop)
    level = find_level<false>(wanted, equals, [&](int* bins, auto bin_of) {
#pragma unroll
      for (int t = 0; t < kAloneTurns; ++t)
        if (t * kTile < stop) count_octet(bins, distance[t], t * kTile + threadIdx.x * kEach, stop, bin_of);
    });
  uint64_t before = 0, all;
#pragma unroll
  for (int t = 0; t < kAloneTurns; ++t) {
    const int at = t * kTile + threadIdx.x * kEach;
    if (t * kTile >= stop) break;
    const uint64_t own = count_kept(distance[t], at, stop, level);
    const uint64_t mine = before + block_before<kThreads>(own, all);
    before += all;
    if (own) put_octet(source, distance[t], at, stop, level, equals, mine);
  }
}

// Likewise of any number, by all blocks of the cluster.
template <class Source>
__device__ void select_shared(const Source& source, int wanted) {
  int first, stop, equals = 0, level = kWorst + 1;
  run_of(source.items, first, stop);
  if (wanted < source.items)
    level = find_level<true>(wanted, equals, [&](int* bins, auto bin_of) {
      for (int tile = first; tile < stop; tile += kTile) {
        const int at = tile + threadIdx.x * kEach;
        int distance[kEach];
        if (at < stop) source.load(at, distance);
        count_octet(bins, distance, at, stop, bin_of);
      }
    });
  else
    cluster_sync();
  __shared__ Mail mail;
  int turn = 0;
  uint64_t own = 0, all;
  int64_t told;
  for (int at = first + threadIdx.x * kEach; at < stop; at += kTile) {
    int distance[kEach];
    source.load(at, distance);
    own += count_kept(distance, at, stop, level);
  }
  uint64_t before = uint64_t(cluster_before<kThreads>(mail, turn, int64_t(own), told));
  // Of the blocks before this one: what thread 0 has before it.
  __shared__ uint64_t base;
  if (threadIdx.x == 0) base = before;
  __syncthreads();
  before = base;
  for (int tile = first; tile < stop; tile += kTile) {
    const int at = tile + threadIdx.x * kEach;
    int distance[kEach];
    own = 0;
    if (at < stop) source.load(at, distance), own = count_kept(distance, at, stop, level);
    const uint64_t mine = before + block_before<kThreads>(own, all);
    before += all;
    if (own) put_octet(source, distance, at, stop, level, equals, mine);
  }
}

// Put the best `wanted` of the items, in order. All blocks of the cluster come here.
template <class Source>
__device__ void select(const Source& source, int wanted) {
  if (source.items > kAlone)
    select_shared(source, wanted);
  else if (cluster_rank() == 0)
    select_alone(source, wanted);
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) select_rows(const dsuf::SelectRows p) {
  using namespace dsuf;
  await_inputs();
  const int64_t row = blockIdx.y;
  const int slot = row < *p.live ? p.row_slot[row] : -1;
  const int reachable = slot < 0 ? 0 : min(p.reachable[row], p.entries), wanted = min(p.count, reachable);
  for (int i = wanted + blockIdx.x * kThreads + threadIdx.x; i < p.count; i += kClusterBlocks * kThreads)
    p.selected[row * p.count + i] = -1;
  if (wanted > 0) select(Entries{p, row, slot, reachable}, wanted);
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) mark_blocks(const dsuf::MarkBlocks p) {
  using namespace dsuf;
  await_inputs();
  const int64_t row = blockIdx.y;
  const int reachable = row < *p.live ? min(p.reachable[row], p.entries) : 0;
  const int items = (reachable + p.block_size - 1) / p.block_size, wanted = min(p.block_count, items);
  for (int i = wanted + blockIdx.x * kThreads + threadIdx.x; i < p.block_count; i += kClusterBlocks * kThreads)
    p.blocks[row * p.block_count + i] = -1;
  if (blockIdx.x == 0 && threadIdx.x == 0)
    p.inside[row] = wanted ? (wanted - 1) * p.block_size + reachable - (items - 1) * p.block_size : 0;
  if (wanted > 0) select(Blocks{p, row, reachable, items}, wanted);
}

// The (row, pick) pairs of a step by expert, so that each expert in use is read once; by one block of 512 threads.
//
// The order is by expert, then by pair number, whatever the timing. Few pairs find their places by counting those
// before them. Many are counted, and then put in their places, 512 at a time: after the pairs of their expert from
// turns before, warps before and lanes before. Pairs without an expert are left out.
#pragma once
#include "reduce.cuh"

namespace dsuf {

constexpr int kGroupThreads = 512, kGroupWarps = kGroupThreads / 32, kMostExperts = 1024, kFewPairs = 1024;

// Lists to be written, and the pairs' experts.
struct Groups {
  const int32_t* chosen;
  int32_t *used, *expert, *first, *order;
  int pairs, experts;

  __device__ __forceinline__ int expert_of(int pair) const { return pair < pairs ? __ldcg(chosen + pair) : -1; }

  // After all pairs in their places: what lies behind the lists.
  template <int kThreads = kGroupThreads>
  __device__ void end(int pairs_total, int used_total) const {
    if (threadIdx.x == 0) *used = used_total;
    for (int i = used_total + threadIdx.x; i <= experts; i += kThreads) {
      if (i < experts) expert[i] = -1;
      first[i] = pairs_total;
    }
    for (int i = pairs_total + threadIdx.x; i < pairs; i += kThreads) order[i] = -1;
  }
};

// The experts that have pairs, a bit each, and how many there are in the words before each word.
struct ExpertsInUse {
  static constexpr int kWords = kMostExperts / 32;
  static_assert(kWords == 32, "a lane a word");
  uint32_t word[kWords];
  int before[kWords], total;

  // From the words to the counts; of one warp.
  __device__ __forceinline__ void count() {
    const int lane = threadIdx.x % 32, own = __popc(word[lane]);
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    before[lane] = sum - own;
    if (lane == 31) total = sum;
  }

  __device__ __forceinline__ int count_before(int expert) const {
    return before[expert / 32] + __popc(word[expert / 32] & ((1u << expert % 32) - 1));
  }
};

// Room of the block that groups, for either way.
union GroupRoom {
  struct {
    alignas(16) uint32_t keys[kFewPairs];  // expert, then pair: their order is that of the pairs
    ExpertsInUse in_use;
  } few;
  struct {
    int load[kMostExperts], begin[kMostExperts];
    uint16_t of_warp[kGroupWarps][kMostExperts];  // pairs of an expert in the warps before, of this turn
  } many;
};

constexpr uint32_t kNoKey = 0xFFFFFFFFu;

// A pair's place in the order.
__device__ __forceinline__ uint32_t key_of(int expert, int pair) {
  return expert < 0 ? kNoKey : uint32_t(expert) * kFewPairs + pair;
}

// From the keys of all pairs, filled up to whole fours: places by counting those before, by a block of kThreads. `in_use`
// is room.
template <int kThreads = kGroupThreads>
__device__ inline void group_keys(const Groups& groups, const uint32_t* keys, ExpertsInUse& in_use) {
  const int padded = (groups.pairs + 3) / 4 * 4;
  if (threadIdx.x < ExpertsInUse::kWords) in_use.word[threadIdx.x] = 0;
  __syncthreads();
  int routed = 0;
#pragma unroll 1
  for (int turn = 0; turn < padded; turn += kThreads) {
    const int pair = turn + threadIdx.x;
    const uint32_t key = pair < padded ? keys[pair] : kNoKey;
    if (key != kNoKey) atomicOr(&in_use.word[key / kFewPairs / 32], 1u << (key / kFewPairs % 32));
    routed += __syncthreads_count(key != kNoKey);
  }
  if (threadIdx.x < 32) in_use.count();
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < groups.pairs; pair += kThreads) {
    const uint32_t key = keys[pair], least = key / kFewPairs * kFewPairs;
    if (key == kNoKey) continue;
    int place = 0, begin = 0;
    for (int other = 0; other < padded; other += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(keys + other);
      place += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
      begin += (four.x < least) + (four.y < least) + (four.z < least) + (four.w < least);
    }
    groups.order[place] = pair;
    if (place != begin) continue;
    const int expert = int(key / kFewPairs);
    const int slot = in_use.count_before(expert);
    groups.expert[slot] = expert;
    groups.first[slot] = begin;
  }
  groups.template end<kThreads>(routed, in_use.total);
}

__device__ inline void group_few(const Groups& groups, GroupRoom& room) {
  for (int pair = threadIdx.x; pair < (groups.pairs + 3) / 4 * 4; pair += kGroupThreads)
    room.few.keys[pair] = key_of(groups.expert_of(pair), pair);
  group_keys(groups, room.few.keys, room.few.in_use);
}

// From the loads of all experts: where each begins, and the lists of those in use.
__device__ inline void list_experts(const Groups& groups, const int* load, int* begin, int& pairs_total,
                                    int& used_total) {
  const int e = threadIdx.x * 2;
  const uint64_t first = uint64_t(load[e] > 0) << 32 | uint32_t(load[e]);
  const uint64_t second = uint64_t(load[e + 1] > 0) << 32 | uint32_t(load[e + 1]);
  uint64_t all, before = block_before<kGroupThreads>(first + second, all);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int slot = int(before >> 32), at = int(uint32_t(before));
    begin[e + i] = at;
    if (load[e + i] > 0) groups.expert[slot] = e + i, groups.first[slot] = at;
    before += first;
  }
  pairs_total = int(uint32_t(all));
  used_total = int(all >> 32);
}

__device__ inline void group_many(const Groups& groups, GroupRoom& room) {
  auto& [load, begin, of_warp] = room.many;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = groups.pairs;
  for (int e = threadIdx.x; e < kMostExperts; e += kGroupThreads) {
    load[e] = 0;
    for (int w = 0; w < kGroupWarps; ++w) of_warp[w][e] = 0;
  }
  __syncthreads();
  for (int turn = 0; turn < pairs; turn += kGroupThreads) {
    const int expert = groups.expert_of(turn + threadIdx.x);
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) atomicAdd(&load[expert], __popc(same));
  }
  __syncthreads();
  int pairs_total, used_total;
  list_experts(groups, load, begin, pairs_total, used_total);
  __syncthreads();
  for (int turn = 0; turn < pairs; turn += kGroupThreads) {
    const int pair = turn + threadIdx.x, expert = groups.expert_of(pair);
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert);
    const bool leads = expert >= 0 && lane == __ffs(same) - 1;
    if (leads) of_warp[warp][expert] = uint16_t(__popc(same));
    __syncthreads();
    const int warps = min(kGroupWarps, (pairs - turn + 31) / 32);
    for (int e = threadIdx.x; e < groups.experts; e += kGroupThreads) {
      int sum = 0;
      for (int w = 0; w < warps; ++w) {
        const int own = of_warp[w][e];
        if (own) of_warp[w][e] = uint16_t(sum);
        sum += own;
      }
      load[e] = begin[e];
      begin[e] += sum;
    }
    __syncthreads();
    if (expert >= 0) groups.order[load[expert] + of_warp[warp][expert] + __popc(same & ((1u << lane) - 1))] = pair;
    __syncwarp();
    if (leads) of_warp[warp][expert] = 0;
    __syncthreads();
  }
  groups.end(pairs_total, used_total);
}

__device__ inline void group(const Groups& groups, GroupRoom& room) {
  if (groups.pairs <= kFewPairs)
    group_few(groups, room);
  else
    group_many(groups, room);
}

}  // namespace dsuf

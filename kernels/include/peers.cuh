// How the ranks of one node meet: words of arrival in everybody's memory, and the sum of what each has a part of.
//
// A rank that announces writes the number of its announcements so far, its epoch, into a word of its own in the memory of every
// rank; one that meets waits until all words of its own memory have reached its own epoch, then reads the others' memory.
#pragma once
#include <stdint.h>

#include "numeric.cuh"

namespace dsuf {

constexpr int kMostRanks = 8;
constexpr int32_t kGone = 1 << 30;  // so far ahead is the word of a rank that was given up

__device__ __forceinline__ void store_release(int32_t* at, int32_t value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ int32_t load_acquire(const int32_t* at) {
  int32_t value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// The last thing that all threads of all blocks of a kernel come to, behind await_inputs: of the block that is the last to come
// here one thread announces what all have written. `counter` is zero before and behind. The second fence orders what the
// other blocks have shown by the first and the counter ahead of all words, so that one is enough for as many ranks.
template <class Params>
__device__ __forceinline__ void announce_as_last(const Params& p) {
  __syncthreads();
  if (threadIdx.x) return;
  const int32_t epoch = int32_t(uint32_t(*p.epoch) + 1);
  int32_t* word[kMostRanks];
#pragma unroll
  for (int r = 0; r < kMostRanks; ++r)
    word[r] = r < p.ranks ? reinterpret_cast<int32_t*>(p.arrived[r]) + p.rank : nullptr;
  const uint32_t blocks = gridDim.x * gridDim.y;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if (atomicInc(reinterpret_cast<unsigned int*>(p.counter), blocks - 1) != blocks - 1) return;
  *p.epoch = epoch;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#pragma unroll
  for (int r = 0; r < kMostRanks; ++r)
    if (word[r]) asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(word[r]), "r"(epoch) : "memory");
}

// Whether *word reaches `epoch` in time; epochs are compared as the counters that they are, which may wrap around.
__device__ __forceinline__ bool wait_for(const int32_t* word, int32_t epoch, int32_t patience_us) {
  const uint64_t deadline = clock_ns() + uint64_t(patience_us) * 1000;
  int32_t ahead;
  while ((ahead = int32_t(uint32_t(load_acquire(word)) - uint32_t(epoch))) < 0)
    if (clock_ns() > deadline) {
      *const_cast<int32_t*>(word) = int32_t(uint32_t(epoch) + kGone + kGone / 2);
      return false;
    }
  return ahead < kGone;
}

// Whether all ranks are there; of all threads of a block, which know it together.
template <class Params>
__device__ __forceinline__ bool meet(const Params& p) {
  bool late = false;
  if (threadIdx.x < p.ranks && !wait_for(p.arrived + threadIdx.x, *p.epoch, p.patience_us)) {
    late = true;
    *p.missing = int32_t(threadIdx.x) + 1;
  }
  return !__syncthreads_or(late);
}

// Where every rank has its part, and an octet of their sum: in float32, in order of rank, so all ranks hold the same bits.
struct Parts {
  const uint16_t* of[kMostRanks];
  int ranks;

  template <class Params>
  __device__ __forceinline__ explicit Parts(const Params& p) : ranks(p.ranks) {
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r)
      of[r] = r < ranks ? reinterpret_cast<const uint16_t*>(p.partials[r]) : nullptr;
  }

  // The eight channels from `at` on of the sum, NaN unless it is complete; behind meet.
  __device__ __forceinline__ void add(int64_t at, bool complete, float (&sum)[8]) const {
    uint4 part[kMostRanks];
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r)
      if (r < ranks) part[r] = __ldcg(reinterpret_cast<const uint4*>(of[r] + at));
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) {
      if (r >= ranks) break;
      float x[8];
      unpack_bf16x8(part[r], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = r == 0 ? x[i] : __fadd_rn(sum[i], x[i]);
    }
    if (!complete)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = __uint_as_float(0x7FC00000u);
  }
};

}  // namespace dsuf

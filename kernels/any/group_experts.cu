// Sort the (row, pick) pairs of a step by expert, so that each expert in use is read once.
//
// Shapes: GroupExperts; experts <= 1024. One block of 512: pairs are counted, and then put in their places, 512 at a
// time; a pair's place is after the pairs of its expert from turns before, warps before and lanes before. So the order
// is by expert, then by pair number, whatever the timing. Padding pairs carry a negative expert and are left out.
// Bound: latency.
#include "contract.h"
#include "launch.cuh"
#include "reduce.cuh"

namespace dsuf {

constexpr int kThreads = 512, kWarps = kThreads / 32, kMost = 1024;

// Lanes of the warp with the same expert.
__device__ __forceinline__ uint32_t lanes_with(int expert) { return __match_any_sync(0xFFFFFFFFu, expert); }

__device__ __forceinline__ int pair_expert(const GroupExperts& p, int pair, int pairs) {
  return pair < pairs ? p.chosen[pair] : -1;
}

// From the loads of all experts: where each begins, and the lists of those in use.
__device__ void list_experts(const GroupExperts& p, const int* load, int* begin, int& pairs_total, int& used_total) {
  const int e = threadIdx.x * 2;
  const uint64_t first = uint64_t(load[e] > 0) << 32 | uint32_t(load[e]);
  const uint64_t second = uint64_t(load[e + 1] > 0) << 32 | uint32_t(load[e + 1]);
  uint64_t all, before = block_before<kThreads>(first + second, all);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int slot = int(before >> 32), at = int(uint32_t(before));
    begin[e + i] = at;
    if (load[e + i] > 0) p.expert[slot] = e + i, p.first[slot] = at;
    before += first;
  }
  pairs_total = int(uint32_t(all));
  used_total = int(all >> 32);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(512) group_experts(const dsuf::GroupExperts p) {
  using namespace dsuf;
  await_inputs();
  __shared__ int load[kMost], begin[kMost];
  __shared__ uint16_t of_warp[kWarps][kMost];  // pairs of an expert in the warps before, of this turn
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = p.rows * p.picks;
  for (int e = threadIdx.x; e < kMost; e += kThreads) {
    load[e] = 0;
    for (int w = 0; w < kWarps; ++w) of_warp[w][e] = 0;
  }
  __syncthreads();
  for (int turn = 0; turn < pairs; turn += kThreads) {
    const int expert = pair_expert(p, turn + threadIdx.x, pairs);
    const uint32_t same = lanes_with(expert);
    if (expert >= 0 && lane == __ffs(same) - 1) atomicAdd(&load[expert], __popc(same));
  }
  __syncthreads();
  int pairs_total, used_total;
  list_experts(p, load, begin, pairs_total, used_total);
  __syncthreads();
  for (int turn = 0; turn < pairs; turn += kThreads) {
    const int pair = turn + threadIdx.x, expert = pair_expert(p, pair, pairs);
    const uint32_t same = lanes_with(expert);
    const bool leads = expert >= 0 && lane == __ffs(same) - 1;
    if (leads) of_warp[warp][expert] = uint16_t(__popc(same));
    __syncthreads();
    const int warps = min(kWarps, (pairs - turn + 31) / 32);
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
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
    if (expert >= 0) p.order[load[expert] + of_warp[warp][expert] + __popc(same & ((1u << lane) - 1))] = pair;
    __syncwarp();
    if (leads) of_warp[warp][expert] = 0;
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.used = used_total;
  for (int i = used_total + threadIdx.x; i <= p.experts; i += kThreads) {
    if (i < p.experts) p.expert[i] = -1;
    p.first[i] = pairs_total;
  }
  for (int i = pairs_total + threadIdx.x; i < pairs; i += kThreads) p.order[i] = -1;
}

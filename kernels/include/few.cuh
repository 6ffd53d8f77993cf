// A product of BF16 rows with up to a thousand outputs: sixteen of them by eight rows a cluster of eight blocks of four
// warps, which share the contraction. The weights are on their way before the input is there.
#pragma once
#include "cluster_sum.cuh"
#include "launch.cuh"
#include "load.cuh"
#include "mma.cuh"

namespace dsuf {

constexpr int kFewBlocks = 8, kFewWarps = 4;
using FewSum = ClusterSum<kFewBlocks, 1, kFewWarps>;

// Outputs from `first` on, of `n`, for rows from row0 on: afterwards sums.sum(0, 0, i) is output i of the row of the
// block's rank. Returns how many rows live. A warp takes at most kAtOnce groups of 32 at a time.
template <int kWidth>
__device__ __forceinline__ int multiply_few(FewSum& sums, const uint16_t* x, const uint16_t* weight, int n, int first,
                                            int row0, const int32_t* live_rows, int rows) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kShares = kFewBlocks * kFewWarps, kGroups = kWidth / 32, kTurns = (kGroups + kShares - 1) / kShares;
  constexpr int kAtOnce = kTurns < 5 ? kTurns : 5;
  cluster_start();
  const int lane = threadIdx.x % 32, part = lane % 4 * 8, row = row0 + lane / 4;
  const uint16_t* low = weight + int64_t(min(first + lane / 4, n - 1)) * kWidth + part;
  const uint16_t* high = weight + int64_t(min(first + lane / 4 + 8, n - 1)) * kWidth + part;
  const uint16_t* own = x + int64_t(row) * kWidth + part;
  const int share = cluster_rank() * kFewWarps + threadIdx.x / 32;
  const int live = min(early_live(live_rows), rows);
  float total[4] = {};
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    uint4 a[kAtOnce], b[kAtOnce], v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int group = min((turn + i) * kShares + share, kGroups - 1);
      a[i] = load_once(low + group * 32);
      b[i] = load_once(high + group * 32);
    }
    if (turn == 0) await_inputs();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int group = (turn + i) * kShares + share;
      v[i] = row < live && group < kGroups ? load_global(own + group * 32) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      mma_bf16(total, a[i].x, b[i].x, a[i].y, b[i].y, v[i].x, v[i].y);
      mma_bf16(total, a[i].z, b[i].z, a[i].w, b[i].w, v[i].z, v[i].w);
    }
  }
  cluster_started();
  sums.add(total, 0);
  return live;
}

}  // namespace dsuf

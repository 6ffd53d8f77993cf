// The sum of a tile whose contraction is shared by the blocks of a cluster: sixteen outputs by eight rows a warp tile.
//
// Warps add up within their block in order, then every block is told its share of the rows by all others and adds up in
// the order of blocks. Two turns have places of their own, so that one barrier of the cluster a turn is enough.
#pragma once
#include "cluster.cuh"
#include "mma.cuh"

namespace dsuf {

// kBlocks blocks share; a block has kTiles tiles of sixteen outputs, of each kWarps warps have a part.
template <int kBlocks, int kTiles, int kWarps>
struct ClusterSum {
  static constexpr int kRows = 8 / kBlocks, kOutputs = 16 * kTiles;
  float part[kTiles][kWarps][16][9];  // a column more than there are rows: no bank conflicts
  float told[2][kBlocks][kRows][kOutputs];

  // Warp kWarps * tile + i has part i of `tile` in c. Afterwards a thread can ask for what the block was told.
  __device__ __forceinline__ void add(const float (&c)[4], int turn) {
    static_assert(8 % kBlocks == 0, "rows are shared out evenly");
    const int warp = threadIdx.x / 32, output = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) part[warp / kWarps][warp % kWarps][output + i / 2 * 8][row + i % 2] = c[i];
    __syncthreads();
    for (int e = threadIdx.x; e < 8 * kOutputs; e += 32 * kTiles * kWarps) {
      const int to = e / kOutputs, column = e % kOutputs;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum = __fadd_rn(sum, part[column / 16][i][column % 16][to]);
      *of_block(&told[turn % 2][cluster_rank()][to % kRows][column], to / kRows) = sum;
    }
    cluster_sync();
  }

  // The whole sum of one of the block's own kRows rows.
  __device__ __forceinline__ float sum(int turn, int row, int column) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) total = __fadd_rn(total, told[turn % 2][i][row][column]);
    return total;
  }
};

}  // namespace dsuf

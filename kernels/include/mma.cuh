// Products on the tensor cores, sixteen outputs by eight rows, with portable warp-level instructions.
//
// Of a warp's lanes, lane / 4 names an output (and that plus 8) of A, or a row of B; lane % 4 names which values of the
// contraction the lane holds. Any assignment will do so long as A and B agree, so a lane takes neighbours in memory.
// A result: c[0], c[1] are output lane / 4 for rows 2 (lane % 4) and the next, c[2], c[3] the same for output + 8.
// Every row's result depends on its own column of B alone.
#pragma once
#include <stdint.h>

namespace dsuf {

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Of E4M3 values: a register holds four of the contraction, even ones the first half of 32, odd ones the second.
__device__ __forceinline__ void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 tiles of 16-bit values from shared memory: lane i gives the address of row i of the 32.
__device__ __forceinline__ void load_tiles(uint32_t (&tiles)[4], const uint16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// Two of them: lane i gives the address of row i of the first sixteen.
__device__ __forceinline__ void load_tile_pair(uint32_t (&tiles)[2], const uint16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(tiles[0]), "=r"(tiles[1])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// Four 8 x 8 tiles of 16-bit values from shared memory, transposed: lane i gives the address of row i of the 32.
__device__ __forceinline__ void load_transposed(uint32_t (&tiles)[4], const uint16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// Sum what kWarps warps hold of one 16 x 8 tile, in warp order; the first 128 threads get an element each:
// thread t has output t / 8 and row t % 8.
template <int kWarps>
__device__ __forceinline__ float sum_tiles(const float (&c)[4]) {
  __shared__ float part[kWarps][16][9];  // a column more than there are rows: no bank conflicts
  const int warp = threadIdx.x / 32, output = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
  __syncthreads();
  part[warp][output][row] = c[0];
  part[warp][output][row + 1] = c[1];
  part[warp][output + 8][row] = c[2];
  part[warp][output + 8][row + 1] = c[3];
  __syncthreads();
  float total = 0.0f;
  if (threadIdx.x < 128) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total = __fadd_rn(total, part[i][threadIdx.x / 8][threadIdx.x % 8]);
  }
  return total;
}

}  // namespace dsuf

// A BF16 linear layer for few rows: router, compressor, index weights, LM head.
//
//   out[r, n] = float32(sum_k w[n, k] * x[r, k]), and its BF16 rounding
//
// Shapes: ProjectBf16; an entry a contraction width: project_bf16_dim, project_bf16_head_dim, and for up to a thousand
// outputs project_bf16_few, of width dim. Rows 16-byte aligned. Each of 8 warps sums every eighth group of 32 on the
// tensor cores, then the warps are added in order. In project_bf16_few a cluster of eight blocks of four warps shares
// the contraction (few.cuh), and the weights are on their way before the input is there. A row's result depends
// on nothing but its input. Grid: (ceil(n / 16), ceil(rows / 8)), of clusters in project_bf16_few. Padding: zeros.
// Bound: the weights' bytes, 2 * n * k, read once for every eight rows.
#include "contract.h"
#include "few.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

__device__ __forceinline__ void store(const ProjectBf16& p, int to, int output, float sum, int live) {
  if (output >= p.n || to >= p.rows) return;
  if (p.out) p.out[int64_t(to) * p.n + output] = to < live ? sum : 0.0f;
  if (p.rounded) p.rounded[int64_t(to) * p.n + output] = to < live ? bf16_bits(sum) : 0;
}

template <int kWidth>
__device__ void project(const ProjectBf16& p) {
  static_assert(kWidth % 32 == 0, "the contraction is whole groups of 32");
  constexpr int kWarps = 8;
  await_inputs();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16, row0 = blockIdx.y * 8;
  const int live = min(*p.live, p.rows), row = row0 + lane / 4, part = lane % 4 * 8;
  const uint16_t* low = p.weight + int64_t(min(first + lane / 4, p.n - 1)) * kWidth + part;
  const uint16_t* high = p.weight + int64_t(min(first + lane / 4 + 8, p.n - 1)) * kWidth + part;
  const uint16_t* x = p.x + int64_t(row) * kWidth + part;
  float total[4] = {};
#pragma unroll 4
  for (int g = warp; g < kWidth / 32; g += kWarps) {
    const uint4 a = *reinterpret_cast<const uint4*>(low + g * 32), b = *reinterpret_cast<const uint4*>(high + g * 32);
    const uint4 v = row < live ? *reinterpret_cast<const uint4*>(x + g * 32) : make_uint4(0, 0, 0, 0);
    mma_bf16(total, a.x, b.x, a.y, b.y, v.x, v.y);
    mma_bf16(total, a.z, b.z, a.w, b.w, v.z, v.w);
  }
  const float sum = sum_tiles<kWarps>(total);
  if (threadIdx.x < 128) store(p, row0 + threadIdx.x % 8, first + threadIdx.x / 8, sum, live);
}

template <int kWidth>
__device__ void project_few(const ProjectBf16& p) {
  __shared__ FewSum sums;
  const int first = blockIdx.x / kFewBlocks * 16, row0 = blockIdx.y * 8;
  const int live = multiply_few<kWidth>(sums, p.x, p.weight, p.n, first, row0, p.live, p.rows);
  if (threadIdx.x < 16) store(p, row0 + cluster_rank(), first + threadIdx.x, sums.sum(0, 0, threadIdx.x), live);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) project_bf16_dim(const dsuf::ProjectBf16 p) {
  dsuf::project<DSUF_DIM>(p);
}
extern "C" __global__ void __launch_bounds__(256) project_bf16_head_dim(const dsuf::ProjectBf16 p) {
  dsuf::project<DSUF_HEAD_DIM>(p);
}
extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128) project_bf16_few(
    const dsuf::ProjectBf16 p) {
  dsuf::project_few<DSUF_DIM>(p);
}

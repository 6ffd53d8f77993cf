// The first output projection: a matrix for each group of heads, FP8 weights, BF16 inputs that are not quantised; and the
// FP8 form of the result.
//
//   out[r, g, n] = bf16(sum_k w[g, n, k] * ws[g, n / 32, k / 32] * x[r, g, k]);   codes, scales = fp8(out)
//
// Shapes: ProjectGroups; k = heads * head_dim / groups (all heads of the launch). Rows 16-byte aligned, rank a multiple
// of 32. Weights are widened to BF16 with their scale in them, which is exact. A cluster of four blocks has 32 outputs,
// a group of the quantiser; its sixteen warps a tile take 64 values of the contraction in turn, and are added in order
// (cluster_sum.cuh). Grid: (4 * groups * rank / 32, ceil(rows / 32)), 256 threads. The first weights are on their way
// before the input is there. Padding: zeros. Bound: the weights' bytes, heads * head_dim * rank.
#include "cluster_sum.cuh"
#include "contract.h"
#include "launch.cuh"
#include "load.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kWidth = DSUF_HEADS * DSUF_HEAD_DIM / DSUF_O_GROUPS, kAll = DSUF_O_GROUPS * DSUF_O_LORA;
constexpr int kBlocks = 4, kWarps = 4, kChunks = (kWidth + 63) / 64;
constexpr int kTurns = (kChunks + kBlocks * kWarps - 1) / (kBlocks * kWarps), kAtOnce = kTurns < 4 ? kTurns : 4;
// Widened weights are 2^-30 of what they mean, so that scales up to 2^37 stay within BF16.
constexpr int kWidenShift = 30;
constexpr float kWidenScale = 1073741824.0f;
static_assert(kWidth % 32 == 0 && DSUF_O_LORA % 32 == 0, "scale blocks are whole");

// Sixteen weights of two outputs, and the scale that they share.
struct Weights {
  uint4 low, high;
  uint8_t scale;
};

// A lane's place along the contraction in its warp's turn; past the end where the last chunk is half.
__device__ __forceinline__ int place_of(int turn) {
  return ((turn * kBlocks + cluster_rank()) * kWarps + threadIdx.x / 32 % kWarps) * 64 + threadIdx.x % 4 * 16;
}

__device__ __forceinline__ void load_weights(const ProjectGroups& p, Weights (&w)[kAtOnce], int first, int turn) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int k = place_of(turn + i);
    const bool inside = k < kWidth;
    const uint8_t* low = p.weight + int64_t(first + threadIdx.x % 32 / 4) * kWidth + k;
    w[i].low = inside ? load_once(low) : make_uint4(0, 0, 0, 0);
    w[i].high = inside ? load_once(low + 8 * kWidth) : make_uint4(0, 0, 0, 0);
    w[i].scale = inside ? p.weight_scale[int64_t(first / 32) * (kWidth / 32) + k / 32] : 0;
  }
}

// Codes 2j and 2j + 1 of four E4M3 codes in place in BF16, where they are 2^-120 of their values, times factor.
__device__ __forceinline__ uint32_t widen_fp8(uint32_t codes, int j, uint32_t factor) {
  const uint32_t high = __byte_perm(codes, 0, j ? 0x3424 : 0x1404);
  return scale_bf16x2((high & 0x80008000u) | (high >> 4 & 0x07F007F0u), factor);
}

__device__ __forceinline__ void add_weights(float (&total)[4], const Weights& w, const uint4 (&v)[2]) {
  const uint32_t low[4] = {w.low.x, w.low.y, w.low.z, w.low.w}, high[4] = {w.high.x, w.high.y, w.high.z, w.high.w};
  const uint32_t x[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
  const uint32_t factor = min(stay(w.scale) + (120 - kWidenShift), 254u) * 0x00800080u;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t a = stay(low[j]), b = stay(high[j]);
    mma_bf16(total, widen_fp8(a, 0, factor), widen_fp8(b, 0, factor), widen_fp8(a, 1, factor), widen_fp8(b, 1, factor),
             x[2 * j], x[2 * j + 1]);
  }
}

// The warp's part of the products with the eight rows from `row0` on; `w` has the first turns' weights.
__device__ __forceinline__ void add_rows(float (&total)[4], const ProjectGroups& p, Weights (&w)[kAtOnce], int first,
                                         int row0, int live, bool again) {
  const int row = row0 + threadIdx.x % 32 / 4;
  const uint16_t* x = p.x + (int64_t(row) * DSUF_O_GROUPS + first / DSUF_O_LORA) * kWidth;
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    if (kTurns > kAtOnce && (again || turn)) load_weights(p, w, first, turn);
    uint4 v[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        v[i][half] = row < live && place_of(turn + i) < kWidth ? load_global(x + place_of(turn + i) + half * 8)
                                                               : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add_weights(total, w[i], v[i]);
  }
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(256) project_groups(const dsuf::ProjectGroups p) {
  using namespace dsuf;
  __shared__ ClusterSum<kBlocks, 2, kWarps> sums;
  const int block = blockIdx.x / kBlocks * 32, warp = threadIdx.x / 32, first = block + warp / kWarps * 16;
  Weights w[kAtOnce];
  cluster_start();
  load_weights(p, w, first, 0);
  const int live = min(early_live(p.live), p.rows);
  await_inputs();
  cluster_started();
  const int stop = min(p.rows, int(blockIdx.y + 1) * 32);
  for (int row0 = blockIdx.y * 32; row0 < stop; row0 += 8) {
    float total[4] = {};
    if (row0 < live) add_rows(total, p, w, first, row0, live, row0 > int(blockIdx.y) * 32);
    sums.add(total, row0 / 8);
    // A warp a row of the block's own, a lane an output.
    const int to = row0 + cluster_rank() * 2 + warp;
    if (warp >= 2 || to >= p.rows) continue;
    const bool inside = to < live;
    const float value = inside ? round_bf16(__fmul_rn(sums.sum(row0 / 8, warp, threadIdx.x % 32), kWidenScale)) : 0.0f;
    const float scale = Fp8::scale(warp_max(fabsf(value)));
    const int64_t at = int64_t(to) * kAll + block + threadIdx.x % 32;
    if (p.out) p.out[at] = bf16_bits(value);
    p.codes[at] = inside ? Fp8::encode(value, scale) : 0;
    if (threadIdx.x % 32 == 0) p.scales[at / 32] = inside ? Fp8::encode_scale(scale) : 0;
  }
}

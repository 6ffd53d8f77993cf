// Scores of the index: how much each compressed entry matters to a row.
//
//   score[r, j] = bf16(sum over heads of bf16(w[r, h] * max(0, bf16(iq[r, h] . ik[j]))))
//
// Shapes: ScoreIndex; queries 8-byte aligned. Keys are FP4 rows in place. A warp takes 32 keys and all heads in turns
// of sixteen, a lane the same quarter of a key and of a query; heads are added lane by lane, then by a fixed tree.
// Entries past what a row may see are -inf and their keys are not read. Grid: (ceil(entries / 256), rows), 8 warps.
// Padding: -inf. Bound: 2 * heads * index dim FLOP a row and entry against index dim * 17 / 32 bytes an entry.
#include "contract.h"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kDim = DSUF_INDEX_DIM, kHeads = DSUF_INDEX_HEADS, kBytes = kDim / 2 + kDim / 32;
constexpr int kSteps = kDim / 16, kTiles = 4;
static_assert(kDim % 32 == 0, "keys are whole groups of 32");

// Four E2M1 codes times a power of two as two pairs of BF16 values: exact.
__device__ __forceinline__ void unpack_codes(uint32_t& low, uint32_t& high, uint32_t codes, float scale) {
  low = bf16_bits(decode_e2m1(codes) * scale) | uint32_t(bf16_bits(decode_e2m1(codes >> 4) * scale)) << 16;
  high = bf16_bits(decode_e2m1(codes >> 8) * scale) | uint32_t(bf16_bits(decode_e2m1(codes >> 12) * scale)) << 16;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) score_index(const dsuf::ScoreIndex p) {
  using namespace dsuf;
  const int lane = threadIdx.x % 32, low = lane / 4, part = lane % 4 * (kDim / 4);
  const int key0 = blockIdx.x * 256 + threadIdx.x / 32 * 32;
  const int64_t row = blockIdx.y;
  const int reachable = row < *p.live ? min(p.reachable[row], p.entries) : 0;
  if (key0 >= p.entries) return;
  uint32_t k_low[kTiles][kSteps], k_high[kTiles][kSteps];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int at = key0 + t * 8 + low;
    const uint8_t* key = p.keys + int64_t(at < reachable ? at : 0) * kBytes;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      k_low[t][s] = k_high[t][s] = 0;
      if (at >= reachable) continue;
      const uint32_t codes = *reinterpret_cast<const uint16_t*>(key + (part + s * 4) / 2);
      unpack_codes(k_low[t][s], k_high[t][s], codes, decode_e8m0(key[kDim / 2 + (part + s * 4) / 32]));
    }
  }
  float sums[kTiles][2] = {};
  for (int head0 = 0; head0 < kHeads && key0 < reachable; head0 += 16) {
    const int first = head0 + low, second = head0 + low + 8;
    const uint16_t* q_low = p.q + (row * kHeads + min(first, kHeads - 1)) * kDim + part;
    const uint16_t* q_high = p.q + (row * kHeads + min(second, kHeads - 1)) * kDim + part;
    float c[kTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint2 a = *reinterpret_cast<const uint2*>(q_low + s * 4);
      const uint2 b = *reinterpret_cast<const uint2*>(q_high + s * 4);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma_bf16(c[t], a.x, b.x, a.y, b.y, k_low[t][s], k_high[t][s]);
    }
    const float w0 = first < kHeads ? bf16_value(p.weights[row * kHeads + first]) : 0.0f;
    const float w1 = second < kHeads ? bf16_value(p.weights[row * kHeads + second]) : 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[t][i % 2] += round_bf16(__fmul_rn(fmaxf(round_bf16(c[t][i]), 0.0f), i < 2 ? w0 : w1));
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums[t][i];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, other);
      const int at = key0 + t * 8 + lane % 4 * 2 + i;
      if (low == 0 && at < p.entries) p.scores[row * p.entries + at] = at < reachable ? round_bf16(sum) : -INFINITY;
    }
}

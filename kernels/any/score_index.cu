// Scores of the index: how much each compressed entry matters to a row.
//
//   score[r, j] = bf16(sum over heads of bf16(w[r, h] * max(0, bf16(iq[r, h] . ik[j]))))
//
// Shapes: ScoreIndex; queries 4-byte aligned. Keys are FP4 rows in place. A warp takes eight keys and all heads in turns
// of sixteen; heads are added lane by lane, then by a fixed tree. Entries past what a row may see are -inf and their keys
// are not read. Grid: (ceil(entries / 64), rows), 8 warps. Padding: -inf.
// Bound: 2 * heads * index dim FLOP a row and entry against index dim * 17 / 32 bytes an entry.
#include "contract.h"
#include "mma.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) score_index(const dsuf::ScoreIndex p) {
  using namespace dsuf;
  constexpr int kDim = DSUF_INDEX_DIM, kHeads = DSUF_INDEX_HEADS, kBytes = kDim / 2 + kDim / 32;
  static_assert(kDim % 32 == 0, "keys are whole groups of 32");
  const int lane = threadIdx.x % 32, low = lane / 4, column = lane % 4 * 2;
  const int key0 = blockIdx.x * 64 + threadIdx.x / 32 * 8;
  const int64_t row = blockIdx.y;
  const int reachable = row < *p.live ? min(p.reachable[row], p.entries) : 0;
  if (key0 >= p.entries) return;
  const bool seen = key0 + low < reachable;
  const uint8_t* key = p.keys + int64_t(seen ? key0 + low : 0) * kBytes;
  uint32_t k_low[kDim / 16], k_high[kDim / 16];
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    k_low[k] = k_high[k] = 0;
    if (!seen) continue;
    const float scale = decode_e8m0(key[kDim / 2 + k / 2]);
    const int a = key[k * 8 + column / 2], b = key[k * 8 + column / 2 + 4];
    k_low[k] = bf16_bits(decode_e2m1(a & 15) * scale) | uint32_t(bf16_bits(decode_e2m1(a >> 4) * scale)) << 16;
    k_high[k] = bf16_bits(decode_e2m1(b & 15) * scale) | uint32_t(bf16_bits(decode_e2m1(b >> 4) * scale)) << 16;
  }
  float even = 0.0f, odd = 0.0f;
  for (int head0 = 0; head0 < kHeads && key0 < reachable; head0 += 16) {
    const int first = head0 + low, second = head0 + low + 8;
    const uint16_t* q_low = p.q + (row * kHeads + min(first, kHeads - 1)) * kDim + column;
    const uint16_t* q_high = p.q + (row * kHeads + min(second, kHeads - 1)) * kDim + column;
    float c[4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint32_t a0 = *reinterpret_cast<const uint32_t*>(q_low + k * 16);
      const uint32_t a1 = *reinterpret_cast<const uint32_t*>(q_high + k * 16);
      const uint32_t a2 = *reinterpret_cast<const uint32_t*>(q_low + k * 16 + 8);
      const uint32_t a3 = *reinterpret_cast<const uint32_t*>(q_high + k * 16 + 8);
      mma_bf16(c, a0, a1, a2, a3, k_low[k], k_high[k]);
    }
    const float w0 = first < kHeads ? bf16_value(p.weights[row * kHeads + first]) : 0.0f;
    const float w1 = second < kHeads ? bf16_value(p.weights[row * kHeads + second]) : 0.0f;
    even += round_bf16(__fmul_rn(fmaxf(round_bf16(c[0]), 0.0f), w0));
    odd += round_bf16(__fmul_rn(fmaxf(round_bf16(c[1]), 0.0f), w0));
    even += round_bf16(__fmul_rn(fmaxf(round_bf16(c[2]), 0.0f), w1));
    odd += round_bf16(__fmul_rn(fmaxf(round_bf16(c[3]), 0.0f), w1));
  }
#pragma unroll
  for (int other = 4; other < 32; other *= 2) {
    even += __shfl_xor_sync(0xFFFFFFFFu, even, other);
    odd += __shfl_xor_sync(0xFFFFFFFFu, odd, other);
  }
  if (low != 0) return;
  const int at = key0 + column;
  float* scores = p.scores + row * p.entries;
  if (at < p.entries) scores[at] = at < reachable ? round_bf16(even) : -INFINITY;
  if (at + 1 < p.entries) scores[at + 1] = at + 1 < reachable ? round_bf16(odd) : -INFINITY;
}

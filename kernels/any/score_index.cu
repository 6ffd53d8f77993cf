// Scores of the index: how much each compressed entry matters to a row.
//
//   score[r, j] = bf16(sum over heads of bf16(w[r, h] * max(0, bf16(iq[r, h] . ik[j]))))
//
// Shapes: ScoreIndex; queries 8-byte aligned. Keys are FP4 rows in place, found through the page table of the row's
// turn. With `blocks` only their entries are scored, one block after the other. A warp takes 32 keys and all heads in
// turns of sixteen, a lane the same quarter of a key and of a query; heads are added lane by lane, then by a fixed
// tree. A block of 8 warps does as many rows as the grid asks for, and unpacks its keys anew only where the turn
// changes. Past what a row may see nothing is read or written. Grid: (ceil(entries / 256), any number up to rows), one
// row each where that does not make more blocks than run at once, else four. Padding: not touched.
// Bound: 2 * heads * index dim FLOP a row and entry against index dim * 17 / 32 bytes an entry of four rows.
#include "contract.h"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kDim = DSUF_INDEX_DIM, kHeads = DSUF_INDEX_HEADS, kBytes = kDim / 2 + kDim / 32;
constexpr int kSteps = kDim / 16, kTiles = 4, kWords = kDim / 32;
static_assert(kDim == 32 || kDim == 64 || kDim == 128, "a quarter of a key is whole words of one group");

// Place `at` of a row's list of entries as a row of the key store.
__device__ __forceinline__ int64_t key_row(const ScoreIndex& p, int64_t row, int slot, int at) {
  int entry = at;
  if (p.blocks) entry = p.blocks[row * p.block_count + at / p.block_size] * p.block_size + at % p.block_size;
  const int shift = 31 - __clz(p.page_rows);
  const int page = p.table[int64_t(slot) * p.table_pages + (entry >> shift)];
  return (int64_t(page) << shift) + (entry & (p.page_rows - 1));
}

// A lane's quarter of 32 keys, as operands of the tensor cores: step s of a tile has the codes 4 s to 4 s + 3 of it.
struct Keys {
  uint32_t low[kTiles][kSteps], high[kTiles][kSteps];

  __device__ __forceinline__ void load(const ScoreIndex& p, int64_t row, int slot, int key0, int reachable) {
    const int part = threadIdx.x % 4;
    uint32_t codes[kTiles][kWords];
    uint8_t scale[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int at = key0 + t * 8 + threadIdx.x % 32 / 4;
      const uint8_t* key = p.keys + (at < reachable ? key_row(p, row, slot, at) : 0) * kBytes;
#pragma unroll
      for (int i = 0; i < kWords; ++i) codes[t][i] = at < reachable ? load_word(key + part * (kDim / 8) + i * 4) : 0;
      scale[t] = at < reachable ? key[kDim / 2 + part * (kDim / 4) / 32] : 0;
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t factor = twice_bf16(decode_e8m0(scale[t]));
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        low[t][s] = scale_bf16x2(bf16x2_e2m1(codes[t][s / 2], s % 2 * 2), factor);
        high[t][s] = scale_bf16x2(bf16x2_e2m1(codes[t][s / 2], s % 2 * 2 + 1), factor);
      }
    }
  }

  // Eight codes of a key.
  __device__ static __forceinline__ uint32_t load_word(const uint8_t* from) {
    if constexpr (kBytes % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    return halves[0] | uint32_t(halves[1]) << 16;
  }
};

__device__ __forceinline__ void score_row(const ScoreIndex& p, const Keys& keys, int64_t row, int key0, int reachable) {
  const int lane = threadIdx.x % 32, low = lane / 4, part = lane % 4 * (kDim / 4);
  float sums[kTiles][2] = {};
  for (int head0 = 0; head0 < kHeads; head0 += 16) {
    const int first = head0 + low, second = head0 + low + 8;
    const uint16_t* q_low = p.q + (row * kHeads + min(first, kHeads - 1)) * kDim + part;
    const uint16_t* q_high = p.q + (row * kHeads + min(second, kHeads - 1)) * kDim + part;
    float c[kTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint2 a = *reinterpret_cast<const uint2*>(q_low + s * 4);
      const uint2 b = *reinterpret_cast<const uint2*>(q_high + s * 4);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma_bf16(c[t], a.x, b.x, a.y, b.y, keys.low[t][s], keys.high[t][s]);
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
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sums[t][i] += __shfl_xor_sync(0xFFFFFFFFu, sums[t][i], other);
      const int at = key0 + t * 8 + lane % 4 * 2 + i;
      if (low == 0 && at < reachable) p.scores[row * p.entries + at] = bf16_bits(sums[t][i]);
    }
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) score_index(const dsuf::ScoreIndex p) {
  using namespace dsuf;
  await_inputs();
  const int key0 = blockIdx.x * 256 + threadIdx.x / 32 * 32;
  const int each = (p.rows + gridDim.y - 1) / gridDim.y;
  const int row0 = blockIdx.y * each, stop = min(row0 + each, min(*p.live, p.rows));
  Keys keys;
  int loaded = -1;
  for (int row = row0; row < stop; ++row) {
    const int slot = p.row_slot[row], reachable = min(p.reachable[row], p.entries);
    if (slot < 0 || key0 >= reachable) continue;
    if (slot != loaded || p.blocks) {
      int furthest = reachable;
      for (int other = row + 1; other < stop && !p.blocks && p.row_slot[other] == slot; ++other)
        furthest = max(furthest, min(p.reachable[other], p.entries));
      keys.load(p, row, slot, key0, furthest);
      loaded = slot;
    }
    score_row(p, keys, row, key0, reachable);
  }
}

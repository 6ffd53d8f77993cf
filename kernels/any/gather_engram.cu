// Rows of an Engram table by the hashes of the last tokens, as the input of a quantised linear.
//
//   hash_n = (id_0 m_0) ^ ... ^ (id_n m_n), n = 1 ..; column (n, head): row = hash_n mod prime + offset
//   codes, scales = fp8(bf16(table[row] * scale))
//
// Shapes: GatherEngram; columns = (shifts - 1) * heads, those of two tokens first. Products stay below 2^63. Table rows
// 8-byte aligned, read where they lie: device memory, or pinned host memory over the bus. A block of 256 a row.
// Padding: zeros, no table row is read.
// Bound: bytes, columns * engram dim * 33 / 32 a row (6.3 KB at the released sizes), scattered.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) gather_engram(const dsuf::GatherEngram p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kDim = DSUF_ENGRAM_DIM, kShifts = DSUF_ENGRAM_SHIFTS, kHeads = DSUF_ENGRAM_HEADS;
  constexpr int kColumns = (kShifts - 1) * kHeads, kOctets = kColumns * kDim / 8;
  static_assert(kDim % 32 == 0 && kColumns * kDim == DSUF_ENGRAM_WIDTH, "columns are whole groups of 32");
  __shared__ int64_t from[kColumns];
  const int64_t row = blockIdx.x;
  const bool live = row < *p.live;
  for (int column = threadIdx.x; live && column < kColumns; column += 256) {
    int64_t hash = p.history[row * kShifts] * p.multipliers[0];
    for (int s = 1; s <= column / kHeads + 1; ++s) hash ^= p.history[row * kShifts + s] * p.multipliers[s];
    from[column] = hash % p.primes[column] + p.offsets[column];
  }
  __syncthreads();
  uint8_t* codes = p.codes + row * DSUF_ENGRAM_WIDTH;
  uint8_t* scales = p.scales + row * (DSUF_ENGRAM_WIDTH / 32);
  for (int first = 0; first < kOctets; first += 256) {
    const int octet = first + threadIdx.x;
    const bool inside = octet < kOctets;
    float x[8] = {};
    if (inside && live) {
      const int64_t source = from[octet / (kDim / 8)];
      const uint2 packed = *reinterpret_cast<const uint2*>(p.table + source * kDim + octet % (kDim / 8) * 8);
      const float scale = decode_e8m0(p.table_scale[source * (kDim / 32) + octet % (kDim / 8) / 4]);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[i] = round_bf16(__fmul_rn(decode_e4m3(uint8_t((i < 4 ? packed.x : packed.y) >> (i % 4 * 8))), scale));
    }
    quantize_octet<Fp8>(x, inside && live, codes, scales, octet);
    if (inside && !live) {
      for (int i = 0; i < 8; ++i) codes[octet * 8 + i] = 0;
      if (octet % 4 == 0) scales[octet / 4] = 0;
    }
  }
}

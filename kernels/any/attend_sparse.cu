// Attention of each row over its own list of cache rows, read packed in place, with a sink in the denominator.
//
//   s = q . k_j / sqrt(head_dim); out = sum bf16(e^(s - m)) v_j / (sum e^(s - m) + e^(sink - m)), k_j = v_j
//
// Shapes: AttendSparse; slots of the window come first, then the selected entries. Window rows that the same launch has
// made can lie apart from the rings, in `fresh`. The softmax runs online
// over blocks of 64 slots in slot order; the probability is rounded to BF16 relative to the running maximum for the
// product alone. head_dim a multiple of 64. A block of 8 warps takes a row and sixteen of its heads: it unpacks 64
// cache rows into shared memory (exact in BF16), each warp scores eight slots, then sums an eighth of the channels. A
// row without slots gives zeros. Grid: (ceil(heads / 16), rows); shared memory 64 * (head_dim + 8) * 2 bytes. Padding:
// zeros. Bound: bytes, head_dim * 33 / 32 a window slot (528) and head_dim * 9 / 16 an entry (288), once for sixteen
// heads.
#include "contract.h"
#include "mma.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {

constexpr int kDim = DSUF_HEAD_DIM, kPitch = kDim + 8, kBlock = 64, kShare = kDim / 8, kTiles = kShare / 8;
static_assert(kDim % 64 == 0, "a warp sums whole tiles of eight channels");

// Four bytes of a packed row, in one load where every row of that stride is aligned for it.
template <int kStride>
__device__ __forceinline__ uint32_t load_word(const uint8_t* from) {
  if constexpr (kStride % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  return from[0] | uint32_t(from[1]) << 8 | uint32_t(from[2]) << 16 | uint32_t(from[3]) << 24;
}

// Eight channels of a cache row as they lie there. Loading is apart from decoding, and takes no branch, so that a
// thread has the loads of many octets under way at once.
struct PackedOctet {
  uint32_t low, high;
  uint8_t scale;

  __device__ __forceinline__ void load(const AttendSparse& p, bool in_window, int slot, int octet) {
    constexpr int kWindowBytes = kDim + kDim / 32, kEntryBytes = kDim / 2 + kDim / 16;
    const bool none = slot == -1;
    const uint8_t* row = slot < 0      ? p.fresh + int64_t(-2 - slot) * kWindowBytes
                         : in_window ? p.window + int64_t(slot) * kWindowBytes
                                     : p.entries + int64_t(slot) * kEntryBytes;
    const uint8_t* codes = row + octet * (in_window ? 8 : 4);
    low = none ? 0 : in_window ? load_word<kWindowBytes>(codes) : load_word<kEntryBytes>(codes);
    high = none || !in_window ? 0 : load_word<kWindowBytes>(codes + 4);
    scale = none ? 0 : row[in_window ? kDim + octet / 4 : kDim / 2 + octet / 2];
  }

  __device__ __forceinline__ uint4 decode(bool in_window) const {
    float x[8];
    if (in_window) {
      const float factor = decode_e8m0(scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = decode_e4m3x2(uint16_t((i < 2 ? low : high) >> (i % 2 * 16)));
        x[2 * i] = __half2float(__ushort_as_half(uint16_t(pair))) * factor;
        x[2 * i + 1] = __half2float(__ushort_as_half(uint16_t(pair >> 16))) * factor;
      }
    } else {
      const float factor = decode_e4m3(scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = decode_e2m1(low >> (4 * i)) * factor;
    }
    return pack_bf16x8(x);
  }
};

__device__ __forceinline__ uint32_t pair_of(const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); }

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) attend_sparse(const dsuf::AttendSparse p) {
  using namespace dsuf;
  extern __shared__ __align__(16) uint16_t rows[];  // [kBlock][kPitch]
  __shared__ int place[kBlock];
  __shared__ float score[16][kBlock + 1], highest[16], decay[16], denominator[16];
  __shared__ uint16_t weight[16][kBlock + 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head0 = blockIdx.x * 16;
  const int64_t row = blockIdx.y;
  const int slots = p.window_slots + p.entry_slots;
  const bool live = row < *p.live;
  const int low = lane / 4, column = lane % 4 * 2;
  float total[kTiles][4] = {};
  if (threadIdx.x < 16) highest[threadIdx.x] = -1e30f, denominator[threadIdx.x] = 0.0f;
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(float(kDim)));
  const uint16_t* q_low = p.q + (row * p.heads + min(head0 + low, p.heads - 1)) * kDim + column;
  const uint16_t* q_high = p.q + (row * p.heads + min(head0 + low + 8, p.heads - 1)) * kDim + column;
  for (int first = 0; live && first < slots; first += kBlock) {
    __syncthreads();
    if (threadIdx.x < kBlock) {
      const int s = first + threadIdx.x;
      place[threadIdx.x] = s < p.window_slots ? p.slots[row * p.window_slots + s]
                           : s < slots        ? max(p.selected[row * p.entry_slots + s - p.window_slots], -1)
                                              : -1;
    }
    __syncthreads();
    constexpr int kOctets = kDim / 8, kAtOnce = kOctets % 32 ? 2 : 8;
    static_assert(kBlock * kOctets % (256 * kAtOnce) == 0, "every thread has whole turns");
    for (int item = threadIdx.x; item < kBlock * kOctets; item += 256 * kAtOnce) {
      PackedOctet packed[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int s = (item + i * 256) / kOctets, octet = (item + i * 256) % kOctets;
        packed[i].load(p, first + s < p.window_slots, place[s], octet);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int s = (item + i * 256) / kOctets, octet = (item + i * 256) % kOctets;
        *reinterpret_cast<uint4*>(rows + s * kPitch + octet * 8) = packed[i].decode(first + s < p.window_slots);
      }
    }
    __syncthreads();
    float c[4] = {};
    const uint16_t* key = rows + (warp * 8 + low) * kPitch + column;
#pragma unroll 8
    for (int k = 0; k < kDim; k += 16)
      mma_bf16(c, pair_of(q_low + k), pair_of(q_high + k), pair_of(q_low + k + 8), pair_of(q_high + k + 8),
               pair_of(key + k), pair_of(key + k + 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = warp * 8 + column + i % 2;
      score[low + i / 2 * 8][s] = place[s] != -1 ? __fmul_rn(c[i], scale) : -INFINITY;
    }
    __syncthreads();
    for (int head = warp; head < 16; head += 8) {
      const float a = score[head][lane], b = score[head][lane + 32], before = highest[head];
      const float now = fmaxf(before, warp_max(fmaxf(a, b)));
      const float pa = expf(a - now), pb = expf(b - now), sum = warp_sum(pa + pb);
      weight[head][lane] = bf16_bits(pa);
      weight[head][lane + 32] = bf16_bits(pb);
      __syncwarp();
      if (lane == 0) {
        decay[head] = expf(before - now);
        denominator[head] = __fadd_rn(__fmul_rn(denominator[head], decay[head]), sum);
        highest[head] = now;
      }
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float sum[4] = {};
      const uint16_t* value = rows + lane * kPitch + warp * kShare + t * 8;
#pragma unroll
      for (int k = 0; k < kBlock; k += 32) {
        uint32_t v[4];
        load_transposed(v, value + k * kPitch);
        mma_bf16(sum, pair_of(&weight[low][k + column]), pair_of(&weight[low + 8][k + column]),
                 pair_of(&weight[low][k + column + 8]), pair_of(&weight[low + 8][k + column + 8]), v[0], v[1]);
        mma_bf16(sum, pair_of(&weight[low][k + column + 16]), pair_of(&weight[low + 8][k + column + 16]),
                 pair_of(&weight[low][k + column + 24]), pair_of(&weight[low + 8][k + column + 24]), v[2], v[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) total[t][i] = __fadd_rn(__fmul_rn(total[t][i], decay[low + i / 2 * 8]), sum[i]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = head0 + low + i / 2 * 8;
    if (head >= p.heads) continue;
    const float m = highest[low + i / 2 * 8];
    const float below = __fadd_rn(denominator[low + i / 2 * 8], expf(fminf(p.sink[head] - m, 80.0f)));
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      p.out[(row * p.heads + head) * kDim + warp * kShare + t * 8 + column + i % 2] =
          live ? bf16_bits(__fdiv_rn(total[t][i], below)) : 0;
  }
}

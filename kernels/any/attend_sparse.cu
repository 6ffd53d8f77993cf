// Attention of each row over its own list of cache rows, read packed in place, with a sink in the denominator.
//
//   q is turned to the row's position; s = q . k_j / sqrt(head_dim);
//   out = sum bf16(e^(s - m)) v_j / (sum e^(s - m) + e^(sink - m)), k_j = v_j; out is turned back
//
// Shapes: AttendSparse; slots of the window come first, then the selected entries. Window rows that the same launch has
// made can lie apart from the rings, in `fresh`. With `early` set, all but the queries was there before the launch
// ahead, one that waits before it lets this one start: rows are unpacked meanwhile. They are read past the first-level
// cache. Stores whose row is a multiple of 16 bytes are aligned to 16. head_dim a multiple of 64; at most 640 slots. A
// cluster of 8 blocks takes a row and up to sixteen of its heads, a block up to 80 of its slots: it unpacks the cache
// rows into shared memory, exact in BF16 but for a power of two; a quarter of its 16 warps scores a quarter of the
// channels; the blocks tell each other their highest scores; then each warp sums a sixteenth of the channels, and each
// block gets an eighth of the channels from all eight, and joins them in their order. A probability is rounded to BF16
// for the product alone, relative to the highest score up to its block of 64 slots, as an online softmax over such
// blocks has it. A row without slots gives zeros. Grid: (8 * ceil(heads / 16), rows); shared memory AttentionRoom.
// Padding: zeros. Bound: bytes, head_dim * 33 / 32 a window slot (528) and head_dim * 9 / 16 an entry (288), once for
// sixteen heads.
#include "cluster.cuh"
#include "contract.h"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "reduce.cuh"
#include "rotation.cuh"

namespace dsuf {

constexpr int kDim = DSUF_HEAD_DIM, kPitch = kDim + 8, kMost = 80, kThreads = 512, kWarps = kThreads / 32;
constexpr int kHeads = 16;
constexpr int kItems = kDim / 32, kWindowBytes = kDim + kDim / 32, kEntryBytes = kDim / 2 + kDim / 16;
constexpr int kShare = kDim / kClusterBlocks, kTiles = (kDim / 8 + kWarps - 1) / kWarps, kQuarter = kDim / 4;
static_assert(kDim % 64 == 0, "a quarter of the channels is whole steps of sixteen");

// Heads that a cluster has room for: sixteen, or eight where there are no more.
__device__ __forceinline__ int held_by(const AttendSparse& p) { return p.heads > 8 ? kHeads : 8; }

// Unpacked rows are 2^-16 of their values, which makes the smallest and the largest of their factors BF16 numbers.
constexpr float kRowScale = 65536.0f;

// Where channel `i` of an octet stands in shared memory: codes 4 apart lie beside each other when they are unpacked.
__device__ __forceinline__ uint4 pack_apart(const float (&x)[8]) {
  const float y[8] = {x[0], x[4], x[1], x[5], x[2], x[6], x[3], x[7]};
  return pack_bf16x8(y);
}

// kWords words of a packed row, in wide loads where every row of that stride is aligned for them.
template <int kStride, int kWords>
__device__ __forceinline__ void load_words(uint32_t* words, const uint8_t* from) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    if constexpr (kStride % 16 == 0) {
      const uint4 x = __ldcg(reinterpret_cast<const uint4*>(from) + i / 4);
      words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j)
        if constexpr (kStride % 4 == 0)
          words[j] = __ldcg(reinterpret_cast<const uint32_t*>(from) + j);
        else
          words[j] = __ldcg(from + 4 * j) | uint32_t(__ldcg(from + 4 * j + 1)) << 8 |
                     uint32_t(__ldcg(from + 4 * j + 2)) << 16 | uint32_t(__ldcg(from + 4 * j + 3)) << 24;
    }
  }
}

// 32 channels of a cache row as they lie there. Loading is apart from decoding, so that a thread has many loads under
// way at once.
struct Packed {
  uint32_t words[8];
  uint8_t scales[2];

  __device__ __forceinline__ void load(const AttendSparse& p, bool in_window, int slot, int item) {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = 0;
    scales[0] = scales[1] = 0;
    if (slot == -1) return;
    if (in_window) {
      const uint8_t* row = slot < 0 ? p.fresh + int64_t(-2 - slot) * kWindowBytes
                                    : p.window + int64_t(slot) * kWindowBytes;
      load_words<kWindowBytes, 8>(words, row + item * 32);
      scales[0] = __ldcg(row + kDim + item);
    } else {
      const uint8_t* row = p.entries + int64_t(slot) * kEntryBytes;
      load_words<kEntryBytes, 4>(words, row + item * 16);
      scales[0] = __ldcg(row + kDim / 2 + item * 2);
      scales[1] = __ldcg(row + kDim / 2 + item * 2 + 1);
    }
  }

  // Codes j and j + 4 of an octet of E4M3 codes, 2^-16 of their values.
  __device__ static __forceinline__ uint32_t window_pair(uint32_t low, uint32_t high, int j, uint32_t factor) {
    const uint32_t both = __byte_perm(low, high, j * 0x0011u + (j + 4) * 0x1100u);
    return scale_bf16x2(scale_bf16x2((both & 0x80008000u) | (both >> 4 & 0x07F007F0u), 0x7B807B80u), factor);
  }

  // Codes j and j + 4 of an octet of E2M1 codes, whose bits in place are 2^-126 of them.
  __device__ static __forceinline__ uint32_t entry_pair(uint32_t codes, int j, uint32_t factor) {
    const uint32_t signs = j < 3 ? codes << (12 - 4 * j) : codes;
    const uint32_t values = j < 2 ? codes << (6 - 4 * j) : codes >> (4 * j - 6);
    return scale_bf16x2((signs & 0x80008000u) | (values & 0x01C001C0u), factor);
  }

  // One way for all of a row, so that a warp takes one branch.
  __device__ __forceinline__ void decode(bool in_window, uint4* to) const {
    if (in_window) {
      const uint32_t factor = twice_bf16(__fmul_rn(decode_e8m0(scales[0]), 1.0f / kRowScale));
#pragma unroll
      for (int octet = 0; octet < 4; ++octet) {
        const uint32_t low = words[octet * 2], high = words[octet * 2 + 1];
        to[octet] = make_uint4(window_pair(low, high, 0, factor), window_pair(low, high, 1, factor),
                               window_pair(low, high, 2, factor), window_pair(low, high, 3, factor));
      }
      return;
    }
    const uint32_t factors[2] = {twice_bf16(__fmul_rn(decode_e4m3(scales[0]), 0x1p+110f)),
                                 twice_bf16(__fmul_rn(decode_e4m3(scales[1]), 0x1p+110f))};
#pragma unroll
    for (int octet = 0; octet < 4; ++octet) {
      const uint32_t codes = words[octet], factor = factors[octet / 2];
      to[octet] = make_uint4(entry_pair(codes, 0, factor), entry_pair(codes, 1, factor), entry_pair(codes, 2, factor),
                             entry_pair(codes, 3, factor));
    }
  }
};

// Unpack the rows of `count` slots, in whole sixteens, into shared memory; slots from the `window`-th on are entries.
__device__ __forceinline__ void unpack_rows(const AttendSparse& p, uint16_t* rows, const int* place, int window,
                                            int count) {
  constexpr int kAtOnce = 3;
  const int items = (count + 15) / 16 * 16 * kItems;
  for (int base = 0; base < items; base += kThreads * kAtOnce) {
    Packed packed[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = base + i * kThreads + threadIdx.x, s = item / kItems;
      if (item < items) packed[i].load(p, s < window, place[s], item % kItems);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = base + i * kThreads + threadIdx.x, s = item / kItems;
      if (item < items) packed[i].decode(s < window, reinterpret_cast<uint4*>(rows + s * kPitch + item % kItems * 32));
    }
  }
}

// Which slots a block of the cluster takes, and where its second piece begins: its slots lie in one or two of the row's
// blocks of 64.
struct Run {
  int start, stop, border;

  __device__ Run(int slots, int rank) {
    const int each = (slots + kClusterBlocks * 16 - 1) / (kClusterBlocks * 16) * 16;
    start = min(rank * each, slots);
    stop = min(start + each, slots);
    border = min(stop, (start / 64 + 1) * 64);
  }
  __device__ int block_of(int piece) const { return start / 64 + piece; }
};

// What a block has of a row's heads beside rows and queries.
struct Softmax {
  float told[kHeads][kClusterBlocks][2];          // the highest scores of every block's pieces
  float denominators[kHeads][kClusterBlocks][2];  // every piece's
  float score[kHeads][kMost + 1];
  uint16_t weight[kHeads][kMost + 8];
  float factor[kHeads][2];  // from what a piece's weights are relative to, to the row's highest
  float overall[kHeads];
};

// The room that queries have first, then what the warps score a quarter each, then what other blocks send.
union Exchange {
  uint16_t q[kHeads][kPitch];
  float quarter[3][kHeads][kMost];
  float sums[kShare];  // [block][head held][share]
};

struct AttentionRoom {
  uint16_t rows[kMost][kPitch];
  Exchange exchange;
};

// Scores of all slots, in `whole` sixteens, over the channels that the warp has; a quarter of the warps has a quarter.
constexpr int kTurns = (kMost / 8 + kWarps / 4 - 1) / (kWarps / 4);

__device__ __forceinline__ void score_quarter(float (&c)[kTurns][4], const AttentionRoom& room, int whole) {
  const int lane = threadIdx.x % 32, from = threadIdx.x / 32 / 4 * kQuarter, first = threadIdx.x / 32 % 4;
  const uint16_t* a_row = room.exchange.q[lane % 16] + from + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kQuarter; k += 16) {
    uint32_t a[4];
    load_tiles(a, a_row + k);
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int tile = first + t * (kWarps / 4);
      if (tile * 8 >= whole) continue;
      uint32_t b[2];
      load_tile_pair(b, room.rows[tile * 8 + lane % 8] + from + k + lane / 8 % 2 * 8);
      mma_bf16(c[t], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
  }
}

// Scores of the block's slots from those of the quarters, added in their order.
__device__ __forceinline__ void score_rows(const AttentionRoom& room, Exchange& exchange, Softmax& state,
                                           const int* place, int held, int whole) {
  const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 / 4, first = threadIdx.x / 32 % 4;
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(float(kDim)));
  float c[kTurns][4] = {};
  score_quarter(c, room, whole);
  __syncthreads();
#pragma unroll
  for (int last = 0; last < 2; ++last) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = (first + t * (kWarps / 4)) * 8 + lane % 4 * 2 + i % 2, head = lane / 4 + i / 2 * 8;
        if (s >= whole || head >= held || (quarter == 0) != (last == 1)) continue;
        if (quarter) {
          exchange.quarter[quarter - 1][head][s] = c[t][i];
          continue;
        }
        float sum = c[t][i];
#pragma unroll
        for (int other = 0; other < 3; ++other) sum = __fadd_rn(sum, exchange.quarter[other][head][s]);
        state.score[head][s] = place[s] != -1 ? __fmul_rn(__fmul_rn(sum, kRowScale), scale) : -INFINITY;
      }
    __syncthreads();
  }
}

__device__ __forceinline__ float highest_of(float x) {
  return from_sort_bits(__reduce_max_sync(0xFFFFFFFFu, sort_bits(x)));
}

// A head's slots from `begin` to `end`, of piece `piece`: tell all blocks the highest score.
__device__ __forceinline__ void tell_highest(Softmax& state, int head, int piece, int begin, int end) {
  const int lane = threadIdx.x % 32;
  float most = -INFINITY;
  for (int s = begin + lane; s < end; s += 32) most = fmaxf(most, state.score[head][s]);
  most = highest_of(most);
  if (lane < kClusterBlocks) *of_block(&state.told[head][cluster_rank()][piece], lane) = most;
}

// Likewise its weights, relative to the highest score up to the end of the piece's block of 64, as the online softmax
// rounds them; all blocks are told what the piece adds to the denominator.
__device__ __forceinline__ void weigh(Softmax& state, int slots, int head, int piece, int begin, int end) {
  const int lane = threadIdx.x % 32, other = lane / 2 % kClusterBlocks;
  const float highest = state.told[head][other][lane % 2];
  const bool before = Run(slots, other).block_of(lane % 2) <= Run(slots, cluster_rank()).block_of(piece);
  const float limit = highest_of(before ? fmaxf(highest, -1e30f) : -1e30f);
  const float overall = highest_of(fmaxf(highest, -1e30f)), factor = expf(limit - overall);
  float sum = 0.0f;
  for (int s = begin + lane; s < end; s += 32) {
    const float x = expf(state.score[head][s] - limit);
    sum = __fadd_rn(sum, x);
    state.weight[head][s] = bf16_bits(x);
  }
  sum = __fmul_rn(warp_sum(sum), factor);
  if (lane < kClusterBlocks) *of_block(&state.denominators[head][cluster_rank()][piece], lane) = sum;
  if (lane == 0) state.factor[head][piece] = factor, state.overall[head] = overall;
}

// Add the values of the slots from `begin` to `end` (whole sixteens) by their weights to the warp's channels.
__device__ __forceinline__ void sum_values(float (&total)[kTiles][4], const Softmax& state, const AttentionRoom& room,
                                           int piece, int begin, int end) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kTiles * 8;
  if (first >= kDim) return;
  const uint16_t* values = room.rows[lane % 16] + first + (kTiles > 1 ? lane / 16 * 8 : 0);
  float sum[kTiles][4] = {};
  for (int k = begin; k < end; k += 16) {
    uint32_t a[4];
    load_tiles(a, &state.weight[lane % 16][k + lane / 16 * 8]);
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      uint32_t v[4];
      load_transposed(v, values + k * kPitch + t * 8);
      mma_bf16(sum[t], a[0], a[1], a[2], a[3], v[0], v[1]);
      if (t + 1 < kTiles) mma_bf16(sum[t + 1 < kTiles ? t + 1 : t], a[0], a[1], a[2], a[3], v[2], v[3]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      total[t][i] = __fadd_rn(total[t][i], __fmul_rn(sum[t][i], state.factor[lane / 4 + i / 2 * 8][piece]));
}

// Send each block the sums of its eighth of the channels.
__device__ __forceinline__ void send_sums(const float (&total)[kTiles][4], Exchange& exchange, int held) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int channel = (threadIdx.x / 32 * kTiles + t) * 8 + lane % 4 * 2;
    if (channel >= kDim) continue;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int head = lane / 4 + i / 2 * 8;
      if (head >= held) continue;
      float* own = exchange.sums + (cluster_rank() * held + head) * kShare + channel % kShare;
      float* to = of_block(own, channel / kShare);
      *reinterpret_cast<float2*>(to) = make_float2(total[t][i], total[t][i + 1]);
    }
  }
}

// Where a thread joins what the blocks of the cluster have sent: four neighbours in shared memory are two pairs of
// channels. What it needs beside them is there early.
struct Join {
  static constexpr int kFours = kShare / 4;
  static_assert(kHeads * kFours <= kThreads, "a thread joins once");
  int head, at, channel;
  bool some, turned;
  float sink;
  float2 low, high;  // angles

  __device__ __forceinline__ Join(const AttendSparse& p, int64_t row, int head0, int held) {
    head = threadIdx.x / kFours, at = threadIdx.x % kFours * 4;
    some = head < held && head0 + head < p.heads;
    channel = cluster_rank() * kShare + at / 8 * 8 + at % 8 / 2;
    turned = channel >= kDim - kRopeDim;
    sink = some ? p.sink[head0 + head] : 0.0f;
    low = high = make_float2(1.0f, 0.0f);
    if (!some || !turned) return;
    const float2* angles = reinterpret_cast<const float2*>(p.angles + row * kRopeDim + channel - (kDim - kRopeDim));
    low = __ldcg(angles), high = __ldcg(angles + 2);
  }

  __device__ __forceinline__ void run(const AttendSparse& p, const Exchange& exchange, const Softmax& state,
                                      int64_t row, int head0, int held) const {
    if (!some) return;
    float below = 0.0f, sum[4] = {};
#pragma unroll
    for (int rank = 0; rank < kClusterBlocks; ++rank) {
      below = __fadd_rn(__fadd_rn(below, state.denominators[head][rank][0]), state.denominators[head][rank][1]);
      const float4 own = *reinterpret_cast<const float4*>(&exchange.sums[(rank * held + head) * kShare + at]);
      sum[0] = __fadd_rn(sum[0], own.x), sum[1] = __fadd_rn(sum[1], own.y);
      sum[2] = __fadd_rn(sum[2], own.z), sum[3] = __fadd_rn(sum[3], own.w);
    }
    // A row without slots has a total of zero and the starting maximum, from which the sink would overflow.
    below = __fadd_rn(below, expf(fminf(sink - state.overall[head], 80.0f)));
#pragma unroll
    for (float& x : sum) x = round_bf16(__fdiv_rn(__fmul_rn(x, kRowScale), below));
    if (turned) turn_pair(sum[0], sum[2], low.x, -low.y);
    if (turned) turn_pair(sum[1], sum[3], high.x, -high.y);
    uint32_t* to = reinterpret_cast<uint32_t*>(p.out + (row * p.heads + head0 + head) * kDim + channel);
    to[0] = bf16_bits(sum[0]) | uint32_t(bf16_bits(sum[2])) << 16;
    to[2] = bf16_bits(sum[1]) | uint32_t(bf16_bits(sum[3])) << 16;
  }
};

// The block's part of the heads of a padding row.
__device__ void clear_row(const AttendSparse& p, int64_t row, int head0) {
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out + (row * p.heads + head0) * kDim);
  const int words = min(kHeads, p.heads - head0) * (kDim / 2);
  for (int i = cluster_rank() * kThreads + threadIdx.x; i < words; i += kClusterBlocks * kThreads) out[i] = 0;
}

// The queries of the heads held, turned to the row's position.
__device__ __forceinline__ void load_queries(const AttendSparse& p, Exchange& exchange, int64_t row, int head0,
                                             int held) {
  for (int item = threadIdx.x; item < held * (kDim / 8); item += kThreads) {
    const int head = item / (kDim / 8), octet = item % (kDim / 8);
    const uint16_t* from = p.q + (row * p.heads + min(head0 + head, p.heads - 1)) * kDim;
    float x[8];
    unpack_bf16x8(reinterpret_cast<const uint4*>(from)[octet], x);
    turn_octet(x, octet, kDim, p.angles + row * kRopeDim);
    *reinterpret_cast<uint4*>(&exchange.q[head][octet * 8]) = pack_apart(x);
  }
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512, 2)
    attend_sparse(const dsuf::AttendSparse p) {
  using namespace dsuf;
  let_next_start();
  if (!p.early) await_ahead();
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ int place[kMost];
  __shared__ __align__(16) Softmax state;
  AttentionRoom& room = *reinterpret_cast<AttentionRoom*>(dynamic);
  const int warp = threadIdx.x / 32, head0 = blockIdx.x / kClusterBlocks * kHeads;
  const int64_t row = blockIdx.y;
  if (row >= early_live(p.live)) {
    if (p.early) await_ahead();
    return clear_row(p, row, head0);
  }
  const int slots = p.window_slots + p.entry_slots, held = held_by(p);
  const Run run(slots, cluster_rank());
  cluster_start();
  const int count = run.stop - run.start, border = run.border - run.start, whole = (count + 15) / 16 * 16;
  if (threadIdx.x < kMost) {
    const int s = run.start + threadIdx.x;
    place[threadIdx.x] = s >= run.stop          ? -1
                         : s < p.window_slots ? __ldcg(p.slots + row * p.window_slots + s)
                                              : max(__ldcg(p.selected + row * p.entry_slots + s - p.window_slots), -1);
  }
  __syncthreads();
  unpack_rows(p, room.rows[0], place, p.window_slots - run.start, count);
  if (p.early) await_ahead();
  load_queries(p, room.exchange, row, head0, held);
  __syncthreads();
  score_rows(room, room.exchange, state, place, held, whole);
  const Join own(p, row, head0, held);
  cluster_started();
  const int middle = border == count ? whole : border, begins[2] = {0, middle}, ends[2] = {middle, whole};
  for (int job = warp; job < held * 2; job += kWarps)
    tell_highest(state, job / 2, job % 2, begins[job % 2], ends[job % 2]);
  cluster_sync();
  for (int job = warp; job < held * 2; job += kWarps)
    weigh(state, slots, job / 2, job % 2, begins[job % 2], ends[job % 2]);
  __syncthreads();
  float total[kTiles][4] = {};
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) sum_values(total, state, room, piece, begins[piece], ends[piece]);
  send_sums(total, room.exchange, held);
  cluster_sync();
  own.run(p, room.exchange, state, row, head0, held);
}

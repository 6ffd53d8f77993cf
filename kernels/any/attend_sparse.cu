// Attention of each row over its own list of cache rows, read packed in place, with a sink in the denominator.
//
//   q is turned to the row's position; s = q . k_j / sqrt(head_dim);
//   out = sum bf16(e^(s - m)) v_j / (sum e^(s - m) + e^(sink - m)), k_j = v_j; out is turned back
//
// Shapes: AttendSparse; slots of the window come first, then the selected entries. Window rows that the same launch has
// made can lie apart from the rings, in `fresh`. Stores whose row is a multiple of 16 bytes are aligned to 16. head_dim
// a multiple of 64; at most 640 slots. A cluster of 8 blocks takes a row and sixteen of its heads, a block up to 80 of
// its slots: it unpacks the cache rows into shared memory (exact in BF16), each of 8 warps scores tiles of eight slots;
// the blocks tell each other their highest scores; then each warp sums an eighth of the channels, and each block joins
// an eighth of the channels of all eight, in their order. A probability is rounded to BF16 for the product alone,
// relative to the highest score up to its block of 64 slots, as an online softmax over such blocks has it. A row
// without slots gives zeros. Grid: (8 * ceil(heads / 16), rows); shared memory 96 * (head_dim + 8) * 2 bytes. Padding:
// zeros. Bound: bytes, head_dim * 33 / 32 a window slot (528) and head_dim * 9 / 16 an entry (288), once for sixteen
// heads.
#include "cluster.cuh"
#include "contract.h"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "reduce.cuh"
#include "rotation.cuh"

namespace dsuf {

constexpr int kDim = DSUF_HEAD_DIM, kPitch = kDim + 8, kMost = 80, kHeads = 16, kShare = kDim / 8, kTiles = kShare / 8;
constexpr int kItems = kDim / 16, kWindowBytes = kDim + kDim / 32, kEntryBytes = kDim / 2 + kDim / 16;
static_assert(kDim % 64 == 0, "a warp sums whole tiles of eight channels");

// kWords words of a packed row, in one load where every row of that stride is aligned for it.
template <int kStride, int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[4], const uint8_t* from) {
  if constexpr (kStride % 16 == 0 && kWords == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (kStride % 8 == 0 && kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    words[0] = x.x, words[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if constexpr (kStride % 4 == 0)
        words[i] = reinterpret_cast<const uint32_t*>(from)[i];
      else
        words[i] = from[4 * i] | uint32_t(from[4 * i + 1]) << 8 | uint32_t(from[4 * i + 2]) << 16 |
                 uint32_t(from[4 * i + 3]) << 24;
  }
}

// Sixteen channels of a cache row as they lie there. Loading is apart from decoding, so that a thread has many loads
// under way at once.
struct Packed {
  uint32_t words[4];
  uint8_t scale;

  __device__ __forceinline__ void load(const AttendSparse& p, bool in_window, int slot, int item) {
    words[0] = words[1] = words[2] = words[3] = 0;
    scale = 0;
    if (slot == -1) return;
    if (in_window) {
      const uint8_t* row = slot < 0 ? p.fresh + int64_t(-2 - slot) * kWindowBytes
                                    : p.window + int64_t(slot) * kWindowBytes;
      load_words<kWindowBytes, 4>(words, row + item * 16);
      scale = row[kDim + item / 2];
    } else {
      const uint8_t* row = p.entries + int64_t(slot) * kEntryBytes;
      load_words<kEntryBytes, 2>(words, row + item * 8);
      scale = row[kDim / 2 + item];
    }
  }

  __device__ __forceinline__ void decode(bool in_window, uint4 (&values)[2]) const {
    const uint32_t factor = twice_bf16(in_window ? decode_e8m0(scale) : decode_e4m3(scale));
    uint32_t pair[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      pair[i] = scale_bf16x2(in_window ? bf16x2_e4m3(words[i / 2], i % 2) : bf16x2_e2m1(words[i / 4], i % 4), factor);
    values[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    values[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
  }
};

// Unpack the rows of `count` slots, in whole sixteens, into shared memory; slots from the `window`-th on are entries.
__device__ __forceinline__ void unpack_rows(const AttendSparse& p, uint16_t* rows, const int* place, int window,
                                            int count) {
  constexpr int kAtOnce = 5;
  const int items = (count + 15) / 16 * 16 * kItems;
  for (int first = threadIdx.x; first < items; first += 256 * kAtOnce) {
    Packed packed[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first + i * 256, s = item / kItems;
      if (item < items) packed[i].load(p, s < window, place[s], item % kItems);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first + i * 256, s = item / kItems;
      if (item >= items) continue;
      uint4 values[2];
      packed[i].decode(s < window, values);
      uint4* to = reinterpret_cast<uint4*>(rows + s * kPitch + item % kItems * 16);
      to[0] = values[0];
      to[1] = values[1];
    }
  }
}

// Scores of sixteen heads and eight slots, in four chains of sums.
__device__ __forceinline__ void score_tile(float (&c)[4], const uint16_t* q, const uint16_t* keys) {
  const int lane = threadIdx.x % 32;
  const uint16_t* a_row = q + lane % 16 * kPitch + lane / 16 * 8;
  const uint16_t* b_row = keys + lane % 8 * kPitch + lane / 8 * 8;
  float part[4][4] = {};
#pragma unroll 4
  for (int k = 0; k < kDim; k += 64) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a0[4], a1[4], b[4];
      load_tiles(a0, a_row + k + half * 32);
      load_tiles(a1, a_row + k + half * 32 + 16);
      load_tiles(b, b_row + k + half * 32);
      mma_bf16(part[half * 2], a0[0], a0[1], a0[2], a0[3], b[0], b[1]);
      mma_bf16(part[half * 2 + 1], a1[0], a1[1], a1[2], a1[3], b[2], b[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = __fadd_rn(__fadd_rn(part[0][i], part[1][i]), __fadd_rn(part[2][i], part[3][i]));
}

// What a block has of a row's sixteen heads. Its slots lie in one or two of the row's blocks of 64: pieces.
struct Softmax {
  float2 told[kHeads][kClusterBlocks];        // the highest scores of every block's pieces
  float denominators[kHeads][kClusterBlocks];  // every block's
  float score[kHeads][kMost + 1];
  uint16_t weight[kHeads][kMost + 8];
  float highest[kHeads][2];  // of the piece's scores
  float limit[kHeads][2];    // of all scores up to the end of the piece's block: what its weights are relative to
  float factor[kHeads][2];   // from there to the row's highest
  float denominator[kHeads], overall[kHeads];

  // The highest score of each head in the slots from `begin` to `end`.
  __device__ __forceinline__ void find_highest(int piece, int begin, int end) {
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < kHeads; head += 8) {
      float most = -INFINITY;
      for (int s = begin + lane; s < end; s += 32) most = fmaxf(most, score[head][s]);
      most = warp_max(most);
      if (lane == 0) highest[head][piece] = most;
    }
  }

  // Weights of the slots from `begin` to `end`; adds to the denominators.
  __device__ __forceinline__ void weigh(int piece, int begin, int end) {
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < kHeads; head += 8) {
      float sum = 0.0f;
      for (int s = begin + lane; s < end; s += 32) {
        const float x = expf(score[head][s] - limit[head][piece]);
        sum = __fadd_rn(sum, x);
        weight[head][s] = bf16_bits(x);
      }
      sum = __fmul_rn(warp_sum(sum), factor[head][piece]);
      sum = piece ? __fadd_rn(denominator[head], sum) : sum;
      __syncwarp();
      if (lane == 0) denominator[head] = sum;
      if (piece == 1 && lane < kClusterBlocks) *of_block(&denominators[head][cluster_rank()], lane) = sum;
      __syncwarp();
    }
  }
};

// Which slots a block of the cluster takes, and where its second piece begins.
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

// From the highest scores of all pieces of the cluster: what each piece of this block is relative to. A row's weights
// are rounded relative to the highest score up to the end of their block of 64, as the online softmax rounds them.
__device__ void find_limits(Softmax& state, int slots) {
  if (threadIdx.x < kHeads * kClusterBlocks) {
    const int head = threadIdx.x % kHeads, to = threadIdx.x / kHeads;
    const float2 own = make_float2(state.highest[head][0], state.highest[head][1]);
    *of_block(&state.told[head][cluster_rank()], to) = own;
  }
  cluster_sync();
  if (threadIdx.x >= kHeads) return;
  const int head = threadIdx.x;
  const Run own(slots, cluster_rank());
  float most[2] = {-1e30f, -1e30f}, overall = -1e30f;
#pragma unroll
  for (int rank = 0; rank < kClusterBlocks; ++rank) {
    const Run run(slots, rank);
    const float2 told = state.told[head][rank];
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const float highest = piece ? told.y : told.x;
      overall = fmaxf(overall, highest);
      for (int mine = 0; mine < 2; ++mine)
        if (run.block_of(piece) <= own.block_of(mine)) most[mine] = fmaxf(most[mine], highest);
    }
  }
  for (int piece = 0; piece < 2; ++piece) {
    state.limit[head][piece] = most[piece];
    state.factor[head][piece] = expf(most[piece] - overall);
  }
  state.overall[head] = overall;
}

__device__ __forceinline__ uint32_t pair_of(const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); }

// Add the values of the slots from `begin` to `end` (whole sixteens) by their weights to the warp's channels.
__device__ __forceinline__ void sum_values(float (&total)[kTiles][4], const Softmax& state, const uint16_t* rows,
                                           int piece, int begin, int end) {
  const int lane = threadIdx.x % 32, low = lane / 4, column = lane % 4 * 2;
  const uint16_t* values = rows + lane % 16 * kPitch + threadIdx.x / 32 * kShare + (kTiles > 1 ? lane / 16 * 8 : 0);
  float sum[kTiles][4] = {};
  for (int k = begin; k < end; k += 16) {
    const uint32_t a0 = pair_of(&state.weight[low][k + column]), a1 = pair_of(&state.weight[low + 8][k + column]);
    const uint32_t a2 = pair_of(&state.weight[low][k + column + 8]);
    const uint32_t a3 = pair_of(&state.weight[low + 8][k + column + 8]);
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      uint32_t v[4];
      load_transposed(v, values + k * kPitch + t * 8);
      mma_bf16(sum[t], a0, a1, a2, a3, v[0], v[1]);
      if (t + 1 < kTiles) mma_bf16(sum[t + 1 < kTiles ? t + 1 : t], a0, a1, a2, a3, v[2], v[3]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      total[t][i] = __fadd_rn(total[t][i], __fmul_rn(sum[t][i], state.factor[low + i / 2 * 8][piece]));
}

// Join what the blocks of the cluster have: a block an eighth of the channels.
__device__ void join(const AttendSparse& p, Softmax& state, float* part, int64_t row, int head0, bool live) {
  __shared__ float below[kHeads];
  cluster_sync();
  if (threadIdx.x < kHeads) {
    const int head = threadIdx.x;
    float sum = 0.0f;
    for (int rank = 0; rank < kClusterBlocks; ++rank) sum = __fadd_rn(sum, state.denominators[head][rank]);
    const float sink = live ? p.sink[min(head0 + head, p.heads - 1)] : 0.0f;
    // A row without slots has a total of zero and the starting maximum, from which the sink would overflow.
    below[head] = __fadd_rn(sum, expf(fminf(sink - state.overall[head], 80.0f)));
  }
  __syncthreads();
  constexpr int kPairs = kShare / 2;
  for (int item = threadIdx.x; item < kHeads * kPairs; item += 256) {
    const int head = item / kPairs, channel = cluster_rank() * kShare + item % kPairs * 2;
    if (head0 + head >= p.heads) continue;
    float2 own[kClusterBlocks], sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int rank = 0; rank < kClusterBlocks; ++rank)
      own[rank] = *reinterpret_cast<const float2*>(of_block(part + head * kDim + channel, rank));
#pragma unroll
    for (int rank = 0; rank < kClusterBlocks; ++rank) {
      sum.x = __fadd_rn(sum.x, own[rank].x);
      sum.y = __fadd_rn(sum.y, own[rank].y);
    }
    float low = round_bf16(__fdiv_rn(sum.x, below[head])), high = round_bf16(__fdiv_rn(sum.y, below[head]));
    const int turned = channel - (kDim - kRopeDim);
    if (live && turned >= 0) {
      const float2 angle = *reinterpret_cast<const float2*>(p.angles + row * kRopeDim + turned);
      turn_pair(low, high, angle.x, -angle.y);
    }
    const uint32_t packed = bf16_bits(low) | uint32_t(bf16_bits(high)) << 16;
    *reinterpret_cast<uint32_t*>(p.out + (row * p.heads + head0 + head) * kDim + channel) = live ? packed : 0;
  }
  cluster_sync();
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256) attend_sparse(const dsuf::AttendSparse p) {
  using namespace dsuf;
  await_inputs();
  extern __shared__ __align__(16) uint16_t rows[];  // [kMost][kPitch], then the queries; at the end the block's sums
  __shared__ int place[kMost];
  __shared__ Softmax state;
  uint16_t* q = rows + kMost * kPitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head0 = blockIdx.x / kClusterBlocks * kHeads;
  const int64_t row = blockIdx.y;
  const bool live = row < *p.live;
  const int slots = live ? p.window_slots + p.entry_slots : 0;
  const Run run(slots, cluster_rank());
  cluster_start();
  const int count = run.stop - run.start, border = run.border - run.start, whole = (count + 15) / 16 * 16;
  if (threadIdx.x < kMost) {
    const int s = run.start + threadIdx.x;
    place[threadIdx.x] = s >= run.stop          ? -1
                         : s < p.window_slots ? p.slots[row * p.window_slots + s]
                                              : max(p.selected[row * p.entry_slots + s - p.window_slots], -1);
  }
  for (int item = threadIdx.x; count > 0 && item < kHeads * (kDim / 8); item += 256) {
    const int head = item / (kDim / 8), octet = item % (kDim / 8);
    const uint16_t* from = p.q + (row * p.heads + min(head0 + head, p.heads - 1)) * kDim;
    float x[8];
    unpack_bf16x8(reinterpret_cast<const uint4*>(from)[octet], x);
    turn_octet(x, octet, kDim, p.angles + row * kRopeDim);
    *reinterpret_cast<uint4*>(q + head * kPitch + octet * 8) = pack_bf16x8(x);
  }
  __syncthreads();
  unpack_rows(p, rows, place, p.window_slots - run.start, count);
  __syncthreads();
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(float(kDim)));
  for (int tile = warp; tile * 8 < whole; tile += 8) {
    float c[4];
    score_tile(c, q, rows + tile * 8 * kPitch);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = tile * 8 + lane % 4 * 2 + i % 2;
      state.score[lane / 4 + i / 2 * 8][s] = place[s] != -1 ? __fmul_rn(c[i], scale) : -INFINITY;
    }
  }
  __syncthreads();
  const int middle = border == count ? whole : border, begins[2] = {0, middle}, ends[2] = {middle, whole};
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) state.find_highest(piece, begins[piece], ends[piece]);
  __syncthreads();
  cluster_started();
  find_limits(state, slots);
  __syncthreads();
  float total[kTiles][4] = {};
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) state.weigh(piece, begins[piece], ends[piece]);
  __syncthreads();
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) sum_values(total, state, rows, piece, begins[piece], ends[piece]);
  __syncthreads();
  float* part = reinterpret_cast<float*>(rows);
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      *reinterpret_cast<float2*>(part + (lane / 4 + i / 2 * 8) * kDim + warp * kShare + t * 8 + lane % 4 * 2) =
          make_float2(total[t][i], total[t][i + 1]);
  join(p, state, part, row, head0, live);
}

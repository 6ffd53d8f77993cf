// Streams after a sublayer: the branch spread over them, and they mixed among themselves; and the next one's input.
//
//   out[j] = bf16(post[j] * branch + sum_i comb[i, j] * h[i])   (over comb's first index)
//
//   expand_streams    that alone
//   expand_collapse   and from it the input of the sublayer that follows, as collapse_norm makes it
//   sum_expand, sum_expand_collapse   the same of a branch of which every rank has a part: wait until all have announced,
//                     then branch = bf16((part_0 + part_1) + ...), float32, in order of rank
//
// Shapes: ExpandStreams, ExpandCollapse, SumExpand, SumExpandCollapse, 16-byte aligned rows; `out` may be `streams`, a
// thread reads all streams of its eight channels before it writes. Grid: expand_streams, sum_expand
// (ceil(dim / 8 / 256), rows), 256 threads; the others (8, rows), a cluster of 8 blocks a row, 128 threads. Padding: zeros,
// and nobody waits there; `meaning`, of which routed rows alone are read, stays as it is. Of a rank that does not come the
// branch is NaN and `missing` says it, as in reduce_peers, whose bits these are. What depends on no other rank is loaded
// before the wait.
// Bound: bytes, 4 * streams + 2 a channel (5 with the input); at decode sizes the launch, with ranks the latency of a
// peer's memory, twice.
#include "collapse.cuh"
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "peers.cuh"

namespace dsuf {

constexpr int kStreams = DSUF_STREAMS, kOctets = DSUF_DIM / 8;
static_assert(DSUF_DIM % 8 == 0, "channels are loaded by eight");

// How a row's streams mix.
struct Mixing {
  float post[kStreams], comb[kStreams][kStreams];

  template <class Params>
  __device__ __forceinline__ Mixing(const Params& p, int64_t row) {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      post[j] = p.post[row * kStreams + j];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) comb[s][j] = p.comb[(row * kStreams + s) * kStreams + j];
    }
  }
};

// An octet of all streams of a row, as it is before the sublayer's branch comes.
struct Octet {
  uint4 old[kStreams];

  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int64_t row, int octet) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
      old[s] = reinterpret_cast<const uint4*>(p.streams)[(row * kStreams + s) * kOctets + octet];
  }

  // Expanded and written; h becomes what was written.
  __device__ __forceinline__ void expand(const float (&branch)[8], const Mixing& mixing, uint16_t* out, int64_t row,
                                         int octet, float (&h)[kStreams][8]) const {
    float before[kStreams][8];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) unpack_bf16x8(old[s], before[s]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float mixed = 0.0f;
#pragma unroll
        for (int s = 0; s < kStreams; ++s) mixed = __fmaf_rn(mixing.comb[s][j], before[s][i], mixed);
        h[j][i] = __fadd_rn(__fmul_rn(mixing.post[j], branch[i]), mixed);
      }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const uint4 packed = pack_bf16x8(h[j]);
      reinterpret_cast<uint4*>(out)[(row * kStreams + j) * kOctets + octet] = packed;
      unpack_bf16x8(packed, h[j]);
    }
  }
};

// Where a branch comes from: an array, or the parts of all ranks. Made before the streams are loaded, waited for behind.
struct WholeBranch {
  const uint4* all;

  template <class Params>
  __device__ __forceinline__ explicit WholeBranch(const Params& p) : all(reinterpret_cast<const uint4*>(p.branch)) {}
  template <class Params>
  __device__ __forceinline__ void await(const Params& p) {}
  __device__ __forceinline__ void load(int64_t row, int octet, float (&branch)[8]) const {
    unpack_bf16x8(all[row * kOctets + octet], branch);
  }
};

struct SummedBranch {
  Parts parts;
  bool complete = false;

  template <class Params>
  __device__ __forceinline__ explicit SummedBranch(const Params& p) : parts(p) {}
  // All threads of a block come here.
  template <class Params>
  __device__ __forceinline__ void await(const Params& p) {
    complete = meet(p);
  }
  __device__ __forceinline__ void load(int64_t row, int octet, float (&branch)[8]) const {
    parts.add((row * kOctets + octet) * 8, complete, branch);
#pragma unroll
    for (float& value : branch) value = round_bf16(value);
  }
};

__device__ __forceinline__ void clear_octet(uint16_t* out, int64_t row, int octet) {
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    reinterpret_cast<uint4*>(out)[(row * kStreams + s) * kOctets + octet] = make_uint4(0, 0, 0, 0);
}

template <class Branch, class Params>
__device__ __forceinline__ void expand_row(const Params& p) {
  const int octet = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  const bool inside = octet < kOctets;
  if (row >= *p.live) {
    if (inside) clear_octet(p.out, row, octet);
    return;
  }
  Branch from(p);
  const Mixing mixing(p, row);
  Octet held;
  if (inside) held.load(p, row, octet);
  from.await(p);
  if (!inside) return;
  float branch[8], h[kStreams][8];
  from.load(row, octet, branch);
  held.expand(branch, mixing, p.out, row, octet, h);
}

// What a live row's cluster does, up to the norm.
template <class Branch, class Params>
__device__ __forceinline__ void expand_share(const Params& p, int64_t row, CollapsedShare& share) {
  constexpr int kTurns = CollapsedShare::kTurns;
  Branch from(p);
  const Mixing mixing(p, row);
  float pre[kStreams];
  Octet held[kTurns];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) pre[s] = p.pre[row * kStreams + s];
#pragma unroll
  for (int t = 0; t < kTurns; ++t)
    if (CollapsedShare::octet(t) < kOctets) held[t].load(p, row, CollapsedShare::octet(t));
  from.await(p);
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int octet = CollapsedShare::octet(t);
    if (octet >= kOctets) continue;
    float branch[8], h[kStreams][8];
    from.load(row, octet, branch);
    held[t].expand(branch, mixing, p.out, row, octet, h);
    CollapsedShare::collapse(share.x[t], h, pre);
  }
}

template <class Branch, class Params>
__device__ __forceinline__ void expand_and_collapse(const Params& p) {
  __shared__ Mail mail;
  const int64_t row = blockIdx.y;
  CollapsedShare share;
  share.load(p.weight);
  const bool live = row < early_live(p.live);
  await_inputs();
  uint16_t* y = p.y + row * DSUF_DIM;
  uint8_t* codes = p.codes ? p.codes + row * DSUF_DIM : nullptr;
  uint8_t* scales = p.codes ? p.scales + row * (DSUF_DIM / 32) : nullptr;
  uint16_t* meaning = p.meaning ? p.meaning + row * DSUF_DIM : nullptr;
  if (live) {
    cluster_start();
    expand_share<Branch>(p, row, share);
    return share.finish(mail, y, codes, scales, meaning);
  }
#pragma unroll
  for (int t = 0; t < CollapsedShare::kTurns; ++t)
    if (CollapsedShare::octet(t) < kOctets) clear_octet(p.out, row, CollapsedShare::octet(t));
  CollapsedShare::clear(y, codes, scales);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) expand_streams(const dsuf::ExpandStreams p) {
  dsuf::await_inputs();
  dsuf::expand_row<dsuf::WholeBranch>(p);
}

extern "C" __global__ void __launch_bounds__(256) sum_expand(const dsuf::SumExpand p) {
  dsuf::await_inputs();
  dsuf::expand_row<dsuf::SummedBranch>(p);
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128)
    expand_collapse(const dsuf::ExpandCollapse p) {
  dsuf::expand_and_collapse<dsuf::WholeBranch>(p);
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128)
    sum_expand_collapse(const dsuf::SumExpandCollapse p) {
  dsuf::expand_and_collapse<dsuf::SummedBranch>(p);
}

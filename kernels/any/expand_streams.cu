// Streams after a sublayer: the branch spread over them, and they mixed among themselves; and the next one's input.
//
//   out[j] = bf16(post[j] * branch + sum_i comb[i, j] * h[i])   (over comb's first index)
//
//   expand_streams    that alone
//   expand_collapse   and from it the input of the sublayer that follows, as collapse_norm makes it
//
// Shapes: ExpandStreams, ExpandCollapse, 16-byte aligned rows; `out` may be `streams`, a thread reads all streams of
// its eight channels before it writes. Grid: expand_streams (ceil(dim / 8 / 256), rows), 256 threads; expand_collapse
// (8, rows), a cluster of 8 blocks a row, 128 threads. Padding: zeros; `meaning`, of which routed rows alone are read,
// stays as it is.
// Bound: bytes, 4 * streams + 2 a channel (5 with the input); at decode sizes the launch.
#include "collapse.cuh"
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kStreams = DSUF_STREAMS, kOctets = DSUF_DIM / 8;
static_assert(DSUF_DIM % 8 == 0, "channels are loaded by eight");

// An octet of all streams of row `row`, expanded and written; h becomes what was written.
template <class Params>
__device__ __forceinline__ void expand_octet(const Params& p, int64_t row, int octet, float (&h)[kStreams][8]) {
  float branch[8], old[kStreams][8];
  unpack_bf16x8(reinterpret_cast<const uint4*>(p.branch)[row * kOctets + octet], branch);
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    unpack_bf16x8(reinterpret_cast<const uint4*>(p.streams)[(row * kStreams + s) * kOctets + octet], old[s]);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float post = p.post[row * kStreams + j];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float mixed = 0.0f;
#pragma unroll
      for (int s = 0; s < kStreams; ++s)
        mixed = __fmaf_rn(p.comb[(row * kStreams + s) * kStreams + j], old[s][i], mixed);
      h[j][i] = __fadd_rn(__fmul_rn(post, branch[i]), mixed);
    }
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const uint4 packed = pack_bf16x8(h[j]);
    reinterpret_cast<uint4*>(p.out)[(row * kStreams + j) * kOctets + octet] = packed;
    unpack_bf16x8(packed, h[j]);
  }
}

__device__ __forceinline__ void clear_octet(uint16_t* out, int64_t row, int octet) {
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    reinterpret_cast<uint4*>(out)[(row * kStreams + s) * kOctets + octet] = make_uint4(0, 0, 0, 0);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) expand_streams(const dsuf::ExpandStreams p) {
  using namespace dsuf;
  await_inputs();
  const int octet = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (octet >= kOctets) return;
  if (row >= *p.live) return clear_octet(p.out, row, octet);
  float h[kStreams][8];
  expand_octet(p, row, octet, h);
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128)
    expand_collapse(const dsuf::ExpandCollapse p) {
  using namespace dsuf;
  __shared__ Mail mail;
  const int64_t row = blockIdx.y;
  CollapsedShare held;
  held.load(p.weight);
  const bool live = row < early_live(p.live);
  await_inputs();
  uint16_t* y = p.y + row * DSUF_DIM;
  uint8_t* codes = p.codes ? p.codes + row * DSUF_DIM : nullptr;
  uint8_t* scales = p.codes ? p.scales + row * (DSUF_DIM / 32) : nullptr;
  uint16_t* meaning = p.meaning ? p.meaning + row * DSUF_DIM : nullptr;
  if (live) cluster_start();
  float pre[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) pre[s] = live ? p.pre[row * kStreams + s] : 0.0f;
#pragma unroll
  for (int t = 0; t < CollapsedShare::kTurns; ++t) {
    const int octet = CollapsedShare::octet(t);
    if (octet >= kOctets) continue;
    if (!live) {
      clear_octet(p.out, row, octet);
      continue;
    }
    float h[kStreams][8];
    expand_octet(p, row, octet, h);
    CollapsedShare::collapse(held.x[t], h, pre);
  }
  if (live)
    held.finish(mail, y, codes, scales, meaning);
  else
    CollapsedShare::clear(y, codes, scales);
}

// A sublayer's input: collapse the streams, norm, and the FP8 form of the result (collapse.cuh).
//
// Shapes: CollapseNorm, 16-byte aligned rows. A cluster of 8 blocks a row, an octet a thread at the released width.
// Grid: (8, rows). Padding: zeros; `meaning`, of which routed rows alone are read, stays as it is.
// Bound: bytes, 2 * streams + 3 a channel; at decode sizes the launch.
#include "collapse.cuh"
#include "contract.h"
#include "launch.cuh"

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(128) collapse_norm(const dsuf::CollapseNorm p) {
  using namespace dsuf;
  __shared__ Mail mail;
  const int64_t row = blockIdx.y;
  CollapsedShare held;
  held.load(p.weight);
  await_inputs();
  uint16_t* y = p.y + row * DSUF_DIM;
  uint8_t* codes = p.codes ? p.codes + row * DSUF_DIM : nullptr;
  uint8_t* scales = p.codes ? p.scales + row * (DSUF_DIM / 32) : nullptr;
  uint16_t* meaning = p.meaning ? p.meaning + row * DSUF_DIM : nullptr;
  if (row >= *p.live) return CollapsedShare::clear(y, codes, scales);
  cluster_start();
  float pre[DSUF_STREAMS];
#pragma unroll
  for (int s = 0; s < DSUF_STREAMS; ++s) pre[s] = p.pre[row * DSUF_STREAMS + s];
#pragma unroll
  for (int t = 0; t < CollapsedShare::kTurns; ++t) {
    const int octet = CollapsedShare::octet(t);
    if (octet >= CollapsedShare::kOctets) continue;
    float h[DSUF_STREAMS][8];
#pragma unroll
    for (int s = 0; s < DSUF_STREAMS; ++s)
      unpack_bf16x8(reinterpret_cast<const uint4*>(p.streams + (row * DSUF_STREAMS + s) * DSUF_DIM)[octet], h[s]);
    CollapsedShare::collapse(held.x[t], h, pre);
  }
  held.finish(mail, y, codes, scales, meaning);
}

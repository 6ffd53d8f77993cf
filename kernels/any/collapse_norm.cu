// A sublayer's input: collapse the streams, norm, and the FP8 form of the result.
//
//   u = bf16(sum_i pre[i] * h[i]);   y = bf16(u * rsqrt(mean(u^2) + eps) * weight);   codes, scales = fp8(y)
//
// Shapes: CollapseNorm, 16-byte aligned rows. A block of 640 a row: an octet a thread at the released width. Padding:
// zeros; `meaning`, which only routed rows are read of, is left alone.
// Bound: bytes, 2 * streams + 3 a channel; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(640) collapse_norm(const dsuf::CollapseNorm p) {
  using namespace dsuf;
  await_inputs();
  using Row = NormedRow<DSUF_DIM, 640>;
  const int64_t row = blockIdx.x;
  uint16_t* y = p.y + row * DSUF_DIM;
  uint8_t* codes = p.codes ? p.codes + row * DSUF_DIM : nullptr;
  uint8_t* scales = p.codes ? p.scales + row * (DSUF_DIM / 32) : nullptr;
  uint16_t* meaning = p.meaning ? p.meaning + row * DSUF_DIM : nullptr;
  if (row >= *p.live) return Row::clear(y, codes, scales);
  Row held;
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
    for (float& value : held.x[t]) value = 0.0f;
    if (Row::octet(t) >= Row::kOctets) continue;
#pragma unroll
    for (int s = 0; s < DSUF_STREAMS; ++s) {
      const float pre = p.pre[row * DSUF_STREAMS + s];
      float h[8];
      unpack_bf16x8(reinterpret_cast<const uint4*>(p.streams + (row * DSUF_STREAMS + s) * DSUF_DIM)[Row::octet(t)], h);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float term = __fmul_rn(h[i], pre);
        held.x[t][i] = s ? __fadd_rn(held.x[t][i], term) : term;
      }
    }
    for (float& value : held.x[t]) value = round_bf16(value);
  }
  held.finish(p.weight, y, codes, scales, meaning);
}

// The shared expert's gate: inner = bf16(silu(min(a, limit)) * clamp(b, limit)) for the halves a, b of a row.
//
// Shapes: Swiglu. Grid: (ceil(inter / 256), rows), 256 threads. Padding: zeros. Bound: bytes, 6 an output.
#include "contract.h"
#include "launch.cuh"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256) swiglu_rows(const dsuf::Swiglu p) {
  using namespace dsuf;
  await_inputs();
  const int channel = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (channel >= DSUF_INTER) return;
  const uint16_t* hidden = p.hidden + row * 2 * DSUF_INTER + channel;
  const bool live = row < *p.live;
  p.inner[row * DSUF_INTER + channel] =
      live ? bf16_bits(swiglu(bf16_value(hidden[0]), bf16_value(hidden[DSUF_INTER]))) : 0;
}

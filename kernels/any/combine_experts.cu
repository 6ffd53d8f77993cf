// The branch of the experts: a row's routed outputs in ascending order of expert, then the shared expert.
//
//   out = bf16(((routed[0] + routed[1]) + ...) + shared)   in float32
//
// Shapes: CombineExperts. Grid: (ceil(dim / 256), rows), 256 threads. Padding: zeros, nothing of it is read.
// Bound: bytes, 2 * (picks + 2) a channel.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) combine_experts(const dsuf::CombineExperts p) {
  using namespace dsuf;
  const int channel = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  const bool live = row < early_live(p.live);
  await_inputs();
  if (channel >= DSUF_DIM) return;
  float sum = 0.0f;
  if (live) {
    const uint16_t* routed = p.routed + row * p.picks * DSUF_DIM + channel;
#pragma unroll 8
    for (int i = 0; i < p.picks; ++i) sum = __fadd_rn(sum, bf16_value(routed[i * DSUF_DIM]));
    sum = __fadd_rn(sum, bf16_value(p.shared[row * DSUF_DIM + channel]));
  }
  p.out[row * DSUF_DIM + channel] = bf16_bits(sum);
}

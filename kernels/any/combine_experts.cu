// The branch of the experts: a row's routed outputs in ascending order of expert, then the shared expert.
//
//   out = bf16(((routed[0] + routed[1]) + ...) + shared)   in float32
//
//   combine_experts    that alone
//   announce_experts   and the rank announces, as announce_partial does, that its part of the branch is there
//
// Shapes: CombineExperts, AnnounceExperts. Grid: (ceil(dim / 256), rows), 256 threads. Padding: zeros, nothing of it is
// read. Bound: bytes, 2 * (picks + 2) a channel.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "peers.cuh"

namespace dsuf {

template <class Params>
__device__ __forceinline__ void combine(const Params& p) {
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

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) combine_experts(const dsuf::CombineExperts p) { dsuf::combine(p); }

extern "C" __global__ void __launch_bounds__(256) announce_experts(const dsuf::AnnounceExperts p) {
  dsuf::combine(p);
  dsuf::announce_as_last(p);
}

// Pool the two positions of a group channel by channel, with a softmax over their gates (ratio 2).
//
//   w = softmax(gate_first, gate_second);   pooled = bf16(w_first * kv_first + w_second * kv_second)
//
// Shapes: CompressRows. A row may be kept as the first half of a group that a later step completes; the place it is
// kept in is none that the same launch reads, except that a row may put another in the place that it has read. The
// pooled latent goes on to norm_head_dim. At ratio 1 project_bf16 alone does it. A block of 256 a row. Padding: zeros,
// nothing kept.
// Bound: bytes, 8 to 16 a channel; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) compress_rows(const dsuf::CompressRows p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kDim = DSUF_HEAD_DIM;
  const int64_t row = blockIdx.x;
  const bool live = row < *p.live;
  const int64_t partner = live ? p.partner[row] : -1, keep = live ? p.keep[row] : -1;
  for (int i = threadIdx.x; i < kDim; i += 256) {
    uint16_t pooled = 0;
    if (live) {
      const float kv = p.kv[row * kDim + i], gate = p.gate[row * kDim + i];
      if (keep >= 0) {
        p.halves[keep * 2 * kDim + i] = kv;
        p.halves[(keep * 2 + 1) * kDim + i] = gate;
      }
      if (partner != -1) {
        const float* half = p.halves + (-2 - partner) * 2 * kDim + i;
        const float first = partner >= 0 ? p.kv[partner * kDim + i] : half[0];
        const float first_gate = partner >= 0 ? p.gate[partner * kDim + i] : half[kDim];
        const float most = fmaxf(first_gate, gate);
        const float a = expf(__fadd_rn(first_gate, -most)), b = expf(__fadd_rn(gate, -most)), sum = __fadd_rn(a, b);
        if (keep < -1) {
          p.halves[(-2 - partner) * 2 * kDim + i] = p.kv[(-2 - keep) * kDim + i];
          p.halves[((-2 - partner) * 2 + 1) * kDim + i] = p.gate[(-2 - keep) * kDim + i];
        }
        pooled = bf16_bits(__fadd_rn(__fmul_rn(__fdiv_rn(a, sum), first), __fmul_rn(__fdiv_rn(b, sum), kv)));
      }
    }
    p.pooled[row * kDim + i] = pooled;
  }
}

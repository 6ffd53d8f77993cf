// The weights of the index heads: what their projection gives, times 1 / sqrt(index dim * index heads), in place.
//
// Shapes: ScaleHeads. The factor is rounded to float32 once, the product to BF16. A thread a weight, grid:
// (ceil(rows * index heads / 256), 1). Padding: not touched, it stays zero. Bound: the launch.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) scale_heads(const dsuf::ScaleHeads p) {
  using namespace dsuf;
  await_inputs();
  const int64_t at = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (at >= int64_t(min(*p.live, p.rows)) * DSUF_INDEX_HEADS) return;
  const float scale = float(1.0 / sqrt(double(DSUF_INDEX_DIM)) / sqrt(double(DSUF_INDEX_HEADS)));
  p.weights[at] = bf16_bits(__fmul_rn(bf16_value(p.weights[at]), scale));
}

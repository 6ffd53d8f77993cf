// Root-mean-square norm, and the FP8 form of the result where it feeds a quantised linear.
//
//   y = bf16(x * rsqrt(mean(x^2) + eps) * weight);   codes, scales = fp8(y)
//
// Shapes: NormQuantize, of width dim. Rows and weight 16-byte aligned. A block of 256 a row. Padding: zeros. A row of
// zeros stays zero.
// Bound: bytes, 2 + 2 + 1 an element; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(256) norm_dim(const dsuf::NormQuantize p) {
  using namespace dsuf;
  NormedRow<DSUF_DIM, 256> held;
  held.load_weight(p.weight);
  await_inputs_first();
  const int64_t row = blockIdx.x;
  const bool live = row < *p.live;
  held.load(p.x + row * DSUF_DIM, live);
  held.norm();
  held.put(p.y + row * DSUF_DIM, p.codes ? p.codes + row * DSUF_DIM : nullptr,
           p.codes ? p.scales + row * (DSUF_DIM / 32) : nullptr, live);
}

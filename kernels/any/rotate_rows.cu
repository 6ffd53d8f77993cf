// Rotary positions on the last channels of every head, in place; `inverse` turns back.
//
//   (x[2i], x[2i+1]) becomes bf16 of the complex product with e^(i * angle), angle = float32(position * frequency[i])
//
// Shapes: RotateRows; the rope width is a constant, at most 512 and at most `width`. The angle is rounded to float32
// (as released), its cosine and sine come from float64. A block of 256 a row. Padding: not touched, it stays zero.
// Bound: bytes, 4 a rotated channel; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) rotate_rows(const dsuf::RotateRows p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kPairs = DSUF_ROPE_DIM / 2;
  static_assert(DSUF_ROPE_DIM % 2 == 0 && kPairs <= 256, "a thread a frequency");
  __shared__ float cosine[kPairs], sine[kPairs];
  const int64_t row = blockIdx.x;
  if (row >= *p.live) return;
  if (threadIdx.x < kPairs) {
    const float angle = __fmul_rn(float(p.positions[row]), p.frequencies[threadIdx.x]);
    double s, c;
    sincos(double(angle), &s, &c);
    cosine[threadIdx.x] = float(c);
    sine[threadIdx.x] = p.inverse ? -float(s) : float(s);
  }
  __syncthreads();
  for (int item = threadIdx.x; item < p.heads * kPairs; item += 256) {
    const int head = item / kPairs, pair = item % kPairs;
    uint16_t* x = p.x + (row * p.heads + head) * p.width + p.width - DSUF_ROPE_DIM + 2 * pair;
    const float real = bf16_value(x[0]), imaginary = bf16_value(x[1]), c = cosine[pair], s = sine[pair];
    x[0] = bf16_bits(__fadd_rn(__fmul_rn(real, c), -__fmul_rn(imaginary, s)));
    x[1] = bf16_bits(__fadd_rn(__fmul_rn(real, s), __fmul_rn(imaginary, c)));
  }
}

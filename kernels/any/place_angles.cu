// The angles of rotary positions, once a pass for all that is turned in it.
//
//   angles[kind, r, i] = cos, sin of float32(position * frequency[i])
//   kind 0: the row's position, frequencies of windows; 1: those of compressed layers; 2: likewise, its group's first
//
// Shapes: PlaceAngles. The angle is rounded to float32 (as released), its cosine and sine come from float64. A block of
// 128 a row. Padding: zeros. Bound: latency.
#include "contract.h"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(128) place_angles(const dsuf::PlaceAngles p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kPairs = DSUF_ROPE_DIM / 2;
  const int64_t row = blockIdx.x;
  const bool live = row < *p.live;
  for (int item = threadIdx.x; item < 3 * kPairs; item += 128) {
    const int kind = item / kPairs, i = item % kPairs;
    double sine = 0.0, cosine = 0.0;
    if (live) {
      const int64_t position = kind < 2 ? p.positions[row] : p.group_positions[row];
      const float angle = __fmul_rn(float(position), (kind ? p.compressed : p.window)[i]);
      sincos(double(angle), &sine, &cosine);
    }
    float* to = p.angles + ((kind * int64_t(p.rows) + row) * kPairs + i) * 2;
    to[0] = float(cosine);
    to[1] = float(sine);
  }
}

// Streams after a sublayer: the branch spread over them, and they mixed among themselves.
//
//   out[j] = bf16(post[j] * branch + float(sum_i comb[i, j] * h[i]))   (over comb's first index, in float64)
//
// Shapes: ExpandStreams, 16-byte aligned rows; `out` may be `streams`, a thread reads all streams of its eight channels
// before it writes. Grid: (ceil(dim / 8 / 256), rows), 256 threads. Padding: zeros.
// Bound: bytes, 4 * streams + 2 a channel.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) expand_streams(const dsuf::ExpandStreams p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kStreams = DSUF_STREAMS;
  static_assert(DSUF_DIM % 8 == 0, "channels are loaded by eight");
  const int octet = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (octet >= DSUF_DIM / 8) return;
  uint4* out = reinterpret_cast<uint4*>(p.out) + row * kStreams * (DSUF_DIM / 8) + octet;
  if (row >= *p.live) {
    for (int s = 0; s < kStreams; ++s) out[s * (DSUF_DIM / 8)] = make_uint4(0, 0, 0, 0);
    return;
  }
  float branch[8], h[kStreams][8];
  unpack_bf16x8(reinterpret_cast<const uint4*>(p.branch)[row * (DSUF_DIM / 8) + octet], branch);
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    unpack_bf16x8(reinterpret_cast<const uint4*>(p.streams)[(row * kStreams + s) * (DSUF_DIM / 8) + octet], h[s]);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float post = p.post[row * kStreams + j];
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      double mixed = 0.0;
#pragma unroll
      for (int s = 0; s < kStreams; ++s)
        mixed = fma(double(p.comb[(row * kStreams + s) * kStreams + j]), double(h[s][i]), mixed);
      x[i] = __fadd_rn(__fmul_rn(post, branch[i]), float(mixed));
    }
    out[j * (DSUF_DIM / 8)] = pack_bf16x8(x);
  }
}

// Add an Engram's value to every stream, in proportion to how well the stream matches its key.
//
//   m = (sum of h * (q_weight k_weight) * key) * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) / sqrt(dim)
//   out = bf16(h + sigmoid(sign(m) sqrt(max(|m|, 1e-6))) * value)
//
// Shapes: GateEngram, 16-byte aligned rows; `out` may be `streams`. Sums in float64, as in the reference. A block of
// 256 a stream and row, which reads its channels twice. Padding: zeros.
// Bound: bytes, 2 * (3 * streams + 1) a channel.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(256) gate_engram(const dsuf::GateEngram p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kDim = DSUF_DIM, kStreams = DSUF_STREAMS, kOctets = kDim / 8;
  const int stream = blockIdx.x;
  const int64_t row = blockIdx.y;
  const uint4* h = reinterpret_cast<const uint4*>(p.streams) + (row * kStreams + stream) * kOctets;
  const uint4* key = reinterpret_cast<const uint4*>(p.projected) + (row * (kStreams + 1) + stream) * kOctets;
  const uint4* value = reinterpret_cast<const uint4*>(p.projected) + (row * (kStreams + 1) + kStreams) * kOctets;
  uint4* out = reinterpret_cast<uint4*>(p.out) + (row * kStreams + stream) * kOctets;
  if (row >= *p.live) {
    for (int octet = threadIdx.x; octet < kOctets; octet += 256) out[octet] = make_uint4(0, 0, 0, 0);
    return;
  }
  double match = 0.0, h_squares = 0.0, key_squares = 0.0;
  for (int octet = threadIdx.x; octet < kOctets; octet += 256) {
    float a[8], b[8], q[8], k[8];
    unpack_bf16x8(h[octet], a);
    unpack_bf16x8(key[octet], b);
    unpack_bf16x8(reinterpret_cast<const uint4*>(p.q_weight)[stream * kOctets + octet], q);
    unpack_bf16x8(reinterpret_cast<const uint4*>(p.k_weight)[stream * kOctets + octet], k);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      match += __fmul_rn(__fmul_rn(a[i], __fmul_rn(q[i], k[i])), b[i]);
      h_squares += double(a[i]) * double(a[i]);
      key_squares += double(b[i]) * double(b[i]);
    }
  }
  const float sum = float(block_sum<256>(match));
  const float h_inverse = float(1.0 / sqrt(block_sum<256>(h_squares) / kDim + double(DSUF_NORM_EPS)));
  const float key_inverse = float(1.0 / sqrt(block_sum<256>(key_squares) / kDim + double(DSUF_NORM_EPS)));
  const float shrink = float(1.0 / sqrt(double(kDim)));
  const float m = __fmul_rn(__fmul_rn(__fmul_rn(sum, h_inverse), key_inverse), shrink);
  const float gate = sigmoid(copysignf(__fsqrt_rn(fmaxf(fabsf(m), 1e-6f)), m));
  for (int octet = threadIdx.x; octet < kOctets; octet += 256) {
    float a[8], v[8];
    unpack_bf16x8(h[octet], a);
    unpack_bf16x8(value[octet], v);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = __fadd_rn(a[i], __fmul_rn(gate, v[i]));
    out[octet] = pack_bf16x8(a);
  }
}

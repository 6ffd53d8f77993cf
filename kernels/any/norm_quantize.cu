// Root-mean-square norm, and the FP8 form of the result where it feeds a quantised linear.
//
//   y = bf16(x * rsqrt(mean(x^2) + eps) * weight);   codes, scales = fp8(y)
//
// Shapes: NormQuantize; an entry a width: norm_dim, norm_q_lora, norm_head_dim, norm_index_dim. Rows and weight 16-byte
// aligned. A block of 256 a row. Padding: zeros. An all-zero row stays zero.
// Bound: bytes, 2 + 2 + 1 an element; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "norm.cuh"

namespace dsuf {

template <int kWidth>
__device__ void norm(const NormQuantize& p) {
  await_inputs();
  const int64_t row = blockIdx.x;
  uint16_t* y = p.y + row * kWidth;
  uint8_t* codes = p.codes ? p.codes + row * kWidth : nullptr;
  uint8_t* scales = p.codes ? p.scales + row * (kWidth / 32) : nullptr;
  using Row = NormedRow<kWidth, 256>;
  if (row >= *p.live) return Row::clear(y, codes, scales);
  Row held;
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (Row::octet(t) < Row::kOctets) packed = reinterpret_cast<const uint4*>(p.x + row * kWidth)[Row::octet(t)];
    unpack_bf16x8(packed, held.x[t]);
  }
  held.finish(p.weight, y, codes, scales);
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) norm_dim(const dsuf::NormQuantize p) { dsuf::norm<DSUF_DIM>(p); }
extern "C" __global__ void __launch_bounds__(256) norm_q_lora(const dsuf::NormQuantize p) {
  dsuf::norm<DSUF_Q_LORA>(p);
}
extern "C" __global__ void __launch_bounds__(256) norm_head_dim(const dsuf::NormQuantize p) {
  dsuf::norm<DSUF_HEAD_DIM>(p);
}
extern "C" __global__ void __launch_bounds__(256) norm_index_dim(const dsuf::NormQuantize p) {
  dsuf::norm<DSUF_INDEX_DIM>(p);
}

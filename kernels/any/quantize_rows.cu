// Quantise rows: per group, a scale from the largest magnitude, then the code of x / scale, ties to even.
//
//   quantize_fp8    E4M3 by 32, E8M0 scale   inputs of quantised linears; window rows
//   quantize_index  E2M1 by 32, E8M0 scale   index queries and keys
//   quantize_entry  E2M1 by 16, E4M3 scale   compressed entries
//
// Shapes: QuantizeRows. Codes and scales may lie apart or in one packed row (scales = codes + bytes of the codes, both
// strides the row's). A thread takes eight elements, neighbouring lanes share a group. Grid: (ceil(width / 8 / 256),
// rows). Padding: without `place` codes, scales and meaning are zero; with `place` nothing is written.
// Bound: bytes, 2 in and about 1 (or 1/2) out an element; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

template <class Quantiser>
__device__ void quantize(const QuantizeRows& p) {
  await_inputs();
  const int row = blockIdx.y, octet = blockIdx.x * blockDim.x + threadIdx.x;
  const bool inside = octet < p.width / 8, live = row < *p.live;
  const int64_t place = p.place && live ? p.place[row] : p.place ? -1 : row;
  float x[8] = {};
  if (inside && live) unpack_bf16x8(reinterpret_cast<const uint4*>(p.x + int64_t(row) * p.width)[octet], x);
  uint8_t* codes = p.codes + place * p.codes_stride;
  uint8_t* scales = p.scales + place * p.scales_stride;
  quantize_octet<Quantiser>(x, inside && live && place >= 0, codes, scales, octet);
  if (!inside) return;
  if (!live && place >= 0) {
    const int bytes = 8 / Quantiser::kCodesPerByte, lanes = Quantiser::kGroup / 8;
    for (int i = 0; i < bytes; ++i) codes[octet * bytes + i] = 0;
    if (octet % lanes == 0) scales[octet / lanes] = 0;
  }
  if (p.meaning) {
    if (!live)
      for (float& value : x) value = 0.0f;
    reinterpret_cast<uint4*>(p.meaning + int64_t(row) * p.width)[octet] = pack_bf16x8(x);
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) quantize_fp8(const dsuf::QuantizeRows p) {
  dsuf::quantize<dsuf::Fp8>(p);
}
extern "C" __global__ void __launch_bounds__(256) quantize_index(const dsuf::QuantizeRows p) {
  dsuf::quantize<dsuf::Fp4Index>(p);
}
extern "C" __global__ void __launch_bounds__(256) quantize_entry(const dsuf::QuantizeRows p) {
  dsuf::quantize<dsuf::Fp4Entry>(p);
}

// The index's queries made ready for score_index: rotary positions, the quantiser, and the weights of their heads.
//
//   meaning = what fp4(rotation of q) means;   weights = bf16(weights / sqrt(index dim * index heads))
//
// Shapes: IndexQueries. The weights' factor is rounded to float32 once. A thread an octet, grid: (ceil(index heads *
// index dim / 8 / 256), rows), 256 threads. Padding: zeros; weights are not touched, they stay zero.
// Bound: bytes, 4 a channel; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "rotation.cuh"

extern "C" __global__ void __launch_bounds__(256) index_queries(const dsuf::IndexQueries p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kDim = DSUF_INDEX_DIM, kHeads = DSUF_INDEX_HEADS, kOctets = kHeads * kDim / 8;
  const int64_t row = blockIdx.y;
  const int octet = blockIdx.x * 256 + threadIdx.x;
  const bool inside = octet < kOctets, live = row < *p.live;
  if (live && octet < kHeads) {
    const float scale = float(1.0 / sqrt(double(kDim)) / sqrt(double(kHeads)));
    uint16_t* weight = p.weights + row * kHeads + octet;
    *weight = bf16_bits(__fmul_rn(bf16_value(*weight), scale));
  }
  float x[8] = {};
  if (inside && live) {
    unpack_bf16x8(reinterpret_cast<const uint4*>(p.q)[row * kOctets + octet], x);
    turn_octet(x, octet % (kDim / 8), kDim, p.angles + row * kRopeDim);
  }
  quantize_octet<Fp4Index>(x, false, nullptr, nullptr, octet);
  if (inside)
    reinterpret_cast<uint4*>(p.meaning)[row * kOctets + octet] = live ? pack_bf16x8(x) : make_uint4(0, 0, 0, 0);
}

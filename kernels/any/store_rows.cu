// Rows on their way into the caches: norm, rotary position, quantiser, and the place where they stay.
//
//   normed = bf16(x * rsqrt(mean(x^2) + eps) * weight);   turned = its last channels rotated;   packed = codes, scales
//
//   store_window     window rows            E4M3 by 32, E8M0 scale
//   store_entry      compressed entries     E2M1 by 16, E4M3 scale
//   store_index_key  index keys             E2M1 by 32, E8M0 scale
//   norm_latents     query latents normed with their FP8 form, and window rows, in one launch
//
// Shapes: StoreRows, NormLatents. Rows and weights 16-byte aligned, packed rows where `place` says. A block of 256 a
// row. Grid: (rows, 1); norm_latents (rows, 2). Padding: `normed`, `turned`, and packed rows without `place`, are zero;
// with `place` nothing of them is written.
// Where rows go is known since the pass was placed, before what is ahead of this launch (early_live).
// Bound: bytes, 2 in and 1/2 to 5 out a channel; at decode sizes the launch.
#include "contract.h"
#include "launch.cuh"
#include "norm.cuh"
#include "rotation.cuh"

namespace dsuf {

template <int kWidth, class Quantiser>
__device__ void store(const StoreRows& p) {
  using Row = NormedRow<kWidth, 256>;
  const int64_t row = blockIdx.x;
  const bool live = row < early_live(p.live);
  const int64_t place = !p.place ? row : live ? __ldcg(p.place + row) : -1;
  Row held;
  held.load_weight(p.weight);
  await_inputs();
  held.load(p.x + row * kWidth, live);
  held.norm();
  if (!live) held.clear();
  constexpr int kCodes = kWidth / Quantiser::kCodesPerByte;
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
    const int octet = Row::octet(t);
    const bool inside = octet < Row::kOctets;
    if (inside && p.normed) reinterpret_cast<uint4*>(p.normed + row * kWidth)[octet] = pack_bf16x8(held.x[t]);
    if (inside && live) turn_octet(held.x[t], octet, kWidth, p.angles + row * kRopeDim);
    if (inside && p.turned) reinterpret_cast<uint4*>(p.turned + row * kWidth)[octet] = pack_bf16x8(held.x[t]);
    uint8_t* packed = p.packed + place * p.row_bytes;
    quantize_octet<Quantiser>(held.x[t], inside && live && place >= 0, packed, packed + kCodes, octet);
    if (inside && !live && place >= 0) {
      for (int i = 0; i < 8 / Quantiser::kCodesPerByte; ++i) packed[octet * (8 / Quantiser::kCodesPerByte) + i] = 0;
      if (octet * 8 % Quantiser::kGroup == 0) packed[kCodes + octet * 8 / Quantiser::kGroup] = 0;
    }
  }
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) store_window(const dsuf::StoreRows p) {
  dsuf::store<DSUF_HEAD_DIM, dsuf::Fp8>(p);
}
extern "C" __global__ void __launch_bounds__(256) store_entry(const dsuf::StoreRows p) {
  dsuf::store<DSUF_HEAD_DIM, dsuf::Fp4Entry>(p);
}
extern "C" __global__ void __launch_bounds__(256) store_index_key(const dsuf::StoreRows p) {
  dsuf::store<DSUF_INDEX_DIM, dsuf::Fp4Index>(p);
}

extern "C" __global__ void __launch_bounds__(256) norm_latents(const dsuf::NormLatents p) {
  using namespace dsuf;
  if (blockIdx.y == 1)
    return store<DSUF_HEAD_DIM, Fp8>({p.key, p.key_weight, nullptr, p.turned, p.packed, p.place, p.angles, p.live,
                                      p.row_bytes, p.rows});
  using Row = NormedRow<DSUF_Q_LORA, 256>;
  const int64_t row = blockIdx.x;
  const bool live = row < early_live(p.live);
  Row held;
  held.load_weight(p.weight);
  await_inputs();
  held.load(p.latent + row * DSUF_Q_LORA, live);
  held.norm();
  held.put(p.query + row * DSUF_Q_LORA, p.codes + row * DSUF_Q_LORA, p.scales + row * (DSUF_Q_LORA / 32), live);
}

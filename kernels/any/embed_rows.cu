// How rows enter the streams, and what the draft head reads of them.
//
//   embed_rows    streams[r, s] = embedding[id[r]], pre[r] = (1, 0, 0 ...)
//   mean_streams  taps[r, tap] = bf16(sum over s of streams[r, s] / streams)
//
// Shapes: EmbedRows, MeanStreams; dim a multiple of 8. The sum is float32, first stream first. Grid: (ceil(dim / 8 /
// 256), rows). Padding: zeros. Bound: bytes, 2 * (streams + 1) a channel.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {
constexpr int kOctets = DSUF_DIM / 8, kStreams = DSUF_STREAMS;
static_assert(DSUF_DIM % 8 == 0, "rows are moved by eight");
}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) embed_rows(const dsuf::EmbedRows p) {
  using namespace dsuf;
  await_inputs_first();
  const int octet = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  const bool live = row < *p.live;
  const int id = live ? p.row_id[row] : -1;
  if (octet < kStreams) p.pre[row * kStreams + octet] = live && octet == 0 ? 1.0f : 0.0f;
  if (octet >= kOctets) return;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (id >= 0) x = reinterpret_cast<const uint4*>(p.embedding)[int64_t(id) * kOctets + octet];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) reinterpret_cast<uint4*>(p.streams)[(row * kStreams + s) * kOctets + octet] = x;
}

extern "C" __global__ void __launch_bounds__(256) mean_streams(const dsuf::MeanStreams p) {
  using namespace dsuf;
  await_inputs();
  const int octet = blockIdx.x * 256 + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (octet >= kOctets) return;
  float sum[8] = {};
  for (int s = 0; s < kStreams && row < *p.live; ++s) {
    float x[8];
    unpack_bf16x8(reinterpret_cast<const uint4*>(p.streams)[(row * kStreams + s) * kOctets + octet], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = s ? __fadd_rn(sum[i], x[i]) : x[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __fdiv_rn(sum[i], float(kStreams));
  reinterpret_cast<uint4*>(p.taps)[(row * DSUF_TAPS + p.tap) * kOctets + octet] = pack_bf16x8(sum);
}

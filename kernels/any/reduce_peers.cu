// What the ranks of one node have computed a part of each, brought together in one step: everybody reads everybody's.
//
//   announce_partial: epoch += 1; arrived[this rank] = epoch in the memory of every rank
//   reduce_peers: wait until every rank has announced this rank's epoch; out = bf16((part_0 + part_1) + ...), float32
//   gather_peers: wait likewise; out = part_0, part_1 ... behind each other in every row, float32
//   gather_rows: wait likewise; rank r's share of the rows of some arrays, from r's memory into the same place of one's own
//
// Shapes: AnnouncePartial, ReducePeers, GatherPeers, GatherRows; width a multiple of 8 (gather: of 4), parts 16-byte
// aligned, a share whole sixteens of bytes, at most 8 ranks. The sum, of rows from `first` on, runs in order of rank, so all ranks hold the same bits. A part is read while its owner goes on:
// it may be overwritten after the owner's next reduction, not before, so two parts that take turns are enough. Between
// the two kernels a rank never waits, hence ranks that share a GPU and a stream (all announce, then all reduce) work
// too. A rank that is not there after `patience_us` is named in `missing`, and the rows are NaN: never a sum that lacks
// a part (gather_rows: all bits, which is NaN in every format, and no entry where rows are named). It is not waited for again until it has caught up, so that what is queued ends soon. Padding: zeros, nothing
// of it is read.
// Grid: announce_partial one warp; reduce_peers (ceil(width / 1024), rows) blocks of 128, of which each thread adds
// eight columns; gather_peers (ceil(width / 512), rows), a thread four columns of every part; gather_rows (any number, arrays * ranks), 256 threads.
// Bound: the latency of a peer's memory, twice (the word, then the part). Decode's few rows are summed within what reads the
// sum (expand_streams.cu), and announced by what makes the parts (combine_experts.cu, project_fp8.cu).
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "peers.cuh"

namespace dsuf {

constexpr int kOnTheWay = 4;  // loads of a thread that are under way at the same time

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(32) announce_partial(const dsuf::AnnouncePartial p) {
  using namespace dsuf;
  await_inputs();
  const int32_t epoch = int32_t(uint32_t(*p.epoch) + 1);
  __syncwarp();
  if (threadIdx.x == 0) *p.epoch = epoch;
  __threadfence_system();
  if (threadIdx.x < p.ranks) store_release(reinterpret_cast<int32_t*>(p.arrived[threadIdx.x]) + p.rank, epoch);
}

extern "C" __global__ void __launch_bounds__(128) reduce_peers(const dsuf::ReducePeers p) {
  using namespace dsuf;
  await_inputs();
  const int64_t row = p.first + blockIdx.y, at = row * p.width + (blockIdx.x * 128 + threadIdx.x) * 8;
  const bool inside = (blockIdx.x * 128 + threadIdx.x) * 8 < p.width;
  const Parts parts(p);
  const bool complete = meet(p);
  if (!inside) return;
  float sum[8] = {};
  if (row < *p.live) parts.add(at, complete, sum);
  *reinterpret_cast<uint4*>(p.out + at) = pack_bf16x8(sum);
}

extern "C" __global__ void __launch_bounds__(128) gather_peers(const dsuf::GatherPeers p) {
  using namespace dsuf;
  await_inputs();
  const int64_t row = blockIdx.y;
  const int column = (blockIdx.x * 128 + threadIdx.x) * 4;
  const bool complete = meet(p), live = row < *p.live;
  if (column >= p.width) return;
  for (int r = 0; r < p.ranks; ++r) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (live) {
      x.x = x.y = x.z = x.w = __uint_as_float(0x7FC00000u);
      const float* part = reinterpret_cast<const float*>(p.partials[r]) + row * p.width + column;
      if (complete) x = __ldcg(reinterpret_cast<const float4*>(part));
    }
    *reinterpret_cast<float4*>(p.out + (row * p.ranks + r) * p.width + column) = x;
  }
}

extern "C" __global__ void __launch_bounds__(256) gather_rows(const dsuf::GatherRows p) {
  using namespace dsuf;
  await_inputs();
  const int array = blockIdx.y / p.ranks, from = blockIdx.y % p.ranks;
  if (from == p.rank) return;
  const bool complete = meet(p);
  const int64_t bytes = p.row_bytes[array] * p.rows, stride = gridDim.x * 256;
  const uint4* source = reinterpret_cast<const uint4*>(p.tables[array * kMostRanks + from] + bytes * from);
  uint4* to = reinterpret_cast<uint4*>(p.tables[array * kMostRanks + p.rank] + bytes * from);
  for (int64_t at = blockIdx.x * 256 + threadIdx.x; at < bytes / 16; at += kOnTheWay * stride) {
    uint4 held[kOnTheWay];
#pragma unroll
    for (int i = 0; i < kOnTheWay; ++i) {
      held[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
      if (complete && at + i * stride < bytes / 16) held[i] = __ldcg(source + at + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kOnTheWay; ++i)
      if (at + i * stride < bytes / 16) to[at + i * stride] = held[i];
  }
}

// Which turns take part in a step, and the rows of its draft blocks and of its verification.
//
//   gather_turns  those of the wanted turns that have not ended, packed to the front
//   place_drafts  a block a turn: the anchor, then noise; every row sees the window before the anchor and the block
//   place_verify  the anchor and the drafts worth verifying, turn after turn
//
// Shapes: GatherTurns, PlaceDrafts, PlaceVerify; at most 1024 turns. A draft is left out once the running product of
// the confidences' sigmoids, its own included, is below the threshold. Every slot and row list is packed, so that
// `live` counts are all that later kernels need. Grid: gather_turns and place_verify one block of 1024, place_drafts a
// block of 128 a row. Padding: slots -1. Bound: latency.
#include "contract.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kBlock = DSUF_BLOCK, kWindow = DSUF_WINDOW;

// The sum of `own` over the threads before this one, and over all; 1024 threads.
__device__ int sum_before(int own, int& all) {
  __shared__ int part[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int through = own;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFu, through, step);
    if (lane >= step) through += before;
  }
  if (lane == 31) part[warp] = through;
  __syncthreads();
  int sum = through - own;
  all = 0;
  for (int i = 0; i < 32; ++i) {
    if (i < warp) sum += part[i];
    all += part[i];
  }
  return sum;
}

// How many drafts of block `b` are verified.
__device__ int count_drafts(const PlaceVerify& p, int b) {
  if (!p.drafts) return 0;
  if (!p.confidence || p.threshold <= 0.0f) return p.limit;
  float running = 1.0f;
  for (int i = 0; i < p.limit; ++i) {
    const float own = sigmoid(p.confidence[b * kBlock + i]);
    running = i ? __fmul_rn(running, own) : own;
    if (!(running >= p.threshold)) return i;
  }
  return p.limit;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(1024) gather_turns(const dsuf::GatherTurns p) {
  using namespace dsuf;
  await_inputs();
  const int i = threadIdx.x, slot = i < p.batch ? p.wanted[i] : -1;
  const bool goes = slot >= 0 && slot < p.turns && p.done[slot] == 0;
  int all;
  const int at = sum_before(goes, all);
  if (goes) p.turn[at] = slot;
  if (i >= all && i < p.batch) p.turn[i] = -1;
  if (i == 0) *p.live_turns = all, *p.live_rows = all * kBlock;
}

extern "C" __global__ void __launch_bounds__(128) place_drafts(const dsuf::PlaceDrafts p) {
  using namespace dsuf;
  await_inputs();
  const int row = blockIdx.x, b = row / kBlock, place = row % kBlock;
  const int slot = b < *p.live ? p.turn[b] : -1, start = slot < 0 ? 0 : p.length[slot];
  if (threadIdx.x == 0) {
    p.row_slot[row] = slot;
    p.row_position[row] = p.positions[row] = slot < 0 ? 0 : start + place;
    p.row_id[row] = slot < 0 ? -1 : place ? p.noise_id : p.anchor[slot];
  }
  const int oldest = slot < 0 ? 0 : max(start - kWindow, max(p.floors[slot * 4 + 3], 0));
  for (int i = threadIdx.x; i < kWindow + kBlock; i += 128) {
    int from = -1;
    if (slot >= 0 && i >= kWindow) from = -2 - (b * kBlock + i - kWindow);
    if (slot >= 0 && i < kWindow && oldest + i < start) from = slot * p.ring + (oldest + i) % p.ring;
    p.windows[int64_t(row) * (kWindow + kBlock) + i] = from;
  }
}

extern "C" __global__ void __launch_bounds__(1024) place_verify(const dsuf::PlaceVerify p) {
  using namespace dsuf;
  await_inputs();
  const int b = threadIdx.x, slot = b < min(*p.live, p.batch) ? p.turn[b] : -1;
  const int drafts = slot < 0 ? 0 : count_drafts(p, b);
  int all;
  const int first = sum_before(slot < 0 ? 0 : drafts + 1, all);
  if (b < p.batch) p.verified[b] = drafts, p.first[b] = slot < 0 ? all : first;
  if (slot >= 0) {
    const int start = p.length[slot];
    for (int i = 0; i <= drafts; ++i) {
      p.row_slot[first + i] = slot;
      p.row_position[first + i] = start + i;
      p.row_id[first + i] = i ? p.drafts[b * kBlock + i - 1] : p.anchor[slot];
    }
  }
  for (int row = all + threadIdx.x; row < p.rows; row += 1024)
    p.row_slot[row] = -1, p.row_position[row] = 0, p.row_id[row] = -1;
  if (b == 0) *p.live_rows = all;
}

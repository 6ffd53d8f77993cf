// The best entries of each row, ascending, ties to the lower entry.
//
// Shapes: SelectRows. Scores are BF16 values, so two passes of 256 bins find the count-th best exactly: by the upper, then
// by the lower byte of a 16-bit key that sorts as the scores do. A third pass writes in order. A block of 1024 a row.
// Padding: -1 throughout, scores are not read. Zero of either sign is one value.
// Bound: bytes, 4 an entry and pass (the second and third come from the cache).
#include "contract.h"
#include "numeric.cuh"

namespace dsuf {

__device__ __forceinline__ int sort_key(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f) >> 16;
  return bits & 0x8000u ? 0xFFFF & ~bits : bits | 0x8000u;
}

// The bin in which the wanted-th best lies, and how many are wanted of it; all threads come here.
__device__ void find_bin(const int (&bins)[256], int wanted, int& bin, int& of_bin) {
  if (threadIdx.x == 0) {
    int b = 255;
    while (b > 0 && bins[b] < wanted) wanted -= bins[b--];
    bin = b;
    of_bin = wanted;
  }
  __syncthreads();
}

// Exclusive count of `flag` over the block's threads before this one, and the total.
__device__ int count_before(bool flag, int& total) {
  __shared__ int part[32];
  const uint32_t votes = __ballot_sync(0xFFFFFFFFu, flag);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) part[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  total = 0;
  for (int i = 0; i < 32; ++i) {
    if (i < warp) before += part[i];
    total += part[i];
  }
  return before;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(1024) select_rows(const dsuf::SelectRows p) {
  using namespace dsuf;
  __shared__ int bins[256], upper, lower, of_upper, of_lower;
  const int64_t row = blockIdx.x;
  const int reachable = row < *p.live ? min(p.reachable[row], p.entries) : 0, wanted = min(p.count, reachable);
  const float* scores = p.scores + row * p.entries;
  int32_t* selected = p.selected + row * p.count;
  for (int i = wanted + threadIdx.x; i < p.count; i += 1024) selected[i] = -1;
  if (wanted == 0) return;
  if (threadIdx.x < 256) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < reachable; i += 1024) atomicAdd(&bins[sort_key(scores[i]) >> 8], 1);
  __syncthreads();
  find_bin(bins, wanted, upper, of_upper);
  if (threadIdx.x < 256) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < reachable; i += 1024)
    if (const int key = sort_key(scores[i]); key >> 8 == upper) atomicAdd(&bins[key & 255], 1);
  __syncthreads();
  find_bin(bins, of_upper, lower, of_lower);
  const int level = upper << 8 | lower;
  int written = 0, equals = 0;
  for (int first = 0; first < reachable; first += 1024) {
    const int i = first + threadIdx.x, key = i < reachable ? sort_key(scores[i]) : -1;
    int found, taken;
    const bool equal = key == level;
    const int rank = equals + count_before(equal, found);
    const bool takes = key > level || (equal && rank < of_lower);
    const int at = written + count_before(takes, taken);
    if (takes) selected[at] = i;
    equals += found;
    written += taken;
  }
}

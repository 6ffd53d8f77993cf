// The best entries of each row, ascending, ties to the lower entry.
//
// Shapes: SelectRows. Scores are BF16 values, so two passes of 256 bins find the count-th best exactly: by the upper,
// then by the lower byte of a 16-bit key that sorts as the scores do. Then each thread counts and writes a run of
// neighbours. A block of 1024 a row.
// Padding: -1 throughout, scores are not read. Zero of either sign is one value.
// Bound: bytes, 4 an entry and pass (all but the first come from the cache).
#include "contract.h"
#include "numeric.cuh"

namespace dsuf {

__device__ __forceinline__ int sort_key(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f) >> 16;
  return bits & 0x8000u ? 0xFFFF & ~bits : bits | 0x8000u;
}

// The bin in which the wanted-th best lies, and how many are wanted of it; all threads come here, one warp works.
__device__ void find_bin(const int (&bins)[256], int wanted, int& bin, int& of_bin) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, top = 255 - lane * 8;  // a lane looks at eight bins, from the best down
    int own = 0;
    for (int i = 0; i < 8; ++i) own += bins[top - i];
    int through = own;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xFFFFFFFFu, through, step);
      if (lane >= step) through += before;
    }
    int left = wanted - (through - own);
    if (left > 0 && left <= own) {
      int b = top;
      while (bins[b] < left) left -= bins[b--];
      bin = b;
      of_bin = left;
    }
  }
  __syncthreads();
}

// Count a key's byte into the bins, once for all lanes of the warp that hold the same; all lanes come here.
__device__ __forceinline__ void count_byte(int (&bins)[256], int byte) {
  const uint32_t same = __match_any_sync(0xFFFFFFFFu, byte);
  if (byte >= 0 && int(threadIdx.x % 32) == __ffs(same) - 1) atomicAdd(&bins[byte], __popc(same));
}

// The sum of `own` over the threads before this one.
__device__ int sum_before(int own) {
  __shared__ int part[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int through = own;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFu, through, step);
    if (lane >= step) through += before;
  }
  __syncthreads();
  if (lane == 31) part[warp] = through;
  __syncthreads();
  int sum = through - own;
  for (int i = 0; i < warp; ++i) sum += part[i];
  return sum;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(1024, 1) select_rows(const dsuf::SelectRows p) {
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
  const int turns = (reachable + 1023) / 1024;
  for (int t = 0, i = threadIdx.x; t < turns; ++t, i += 1024)
    count_byte(bins, i < reachable ? sort_key(scores[i]) >> 8 : -1);
  __syncthreads();
  find_bin(bins, wanted, upper, of_upper);
  if (threadIdx.x < 256) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int t = 0, i = threadIdx.x; t < turns; ++t, i += 1024) {
    const int key = i < reachable ? sort_key(scores[i]) : -1;
    count_byte(bins, key >> 8 == upper ? key & 255 : -1);
  }
  __syncthreads();
  find_bin(bins, of_upper, lower, of_lower);
  const int level = upper << 8 | lower;
  // From here a thread has `turns` neighbours, so that two sums over the block give every place.
  const int start = threadIdx.x * turns, stop = min(start + turns, reachable);
  int above = 0, equal = 0;
  for (int i = start; i < stop; ++i) {
    const int key = sort_key(scores[i]);
    above += key > level;
    equal += key == level;
  }
  int rank = sum_before(equal);
  int at = sum_before(above) + min(rank, of_lower);
  for (int i = start; i < stop; ++i) {
    const int key = sort_key(scores[i]);
    if (key > level || (key == level && rank < of_lower)) selected[at++] = i;
    rank += key == level;
  }
}

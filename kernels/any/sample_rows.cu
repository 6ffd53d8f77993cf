// From logits to a token: the arg-max, or a seeded draw from the tempered nucleus; and the nucleus, for acceptance.
//
//   p = softmax(logits / temperature); nucleus: the likeliest tokens whose sum before them is less than top_p, the
//   lower id first among equals; picked: the first id at which the running sum of the nucleus passes draw * its mass
//
// Shapes: SampleRows. The draw depends on seed, position and purpose alone (nucleus.cuh); temperature 0 and negative
// purposes take the arg-max, the lowest id among equals. A cluster of 8 blocks a row, each a share of the vocabulary.
// The nucleus' edge is found by mass, not by sorting: 2048 bins of (peak - logit) / temperature, then the bin's range
// of logits in 2048 parts until a part is one logit; equals are counted by id. Grid: (8, rows).
// Padding: picked -1, the rest zero. Bound: latency; 4 bytes a logit, read a few times from the cache.
#include "cluster.cuh"
#include "contract.h"
#include "nucleus.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kThreads = 512, kBins = 2048;
constexpr float kBinsPerUnit = 64.0f;
using Bins = unsigned long long[kBins];

// A block's share of the row: ids first .. stop, of which a thread takes every 512th, or a run of neighbours.
struct Share {
  const float* logits;
  int first, stop;

  __device__ Share(const float* row, int vocabulary) {
    const int each = (vocabulary + kClusterBlocks - 1) / kClusterBlocks;
    logits = row;
    first = min(cluster_rank() * each, vocabulary);
    stop = min(first + each, vocabulary);
  }

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 4
    for (int id = first + threadIdx.x; id < stop; id += kThreads) visit(logits[id], id);
  }

  __device__ int run() const { return (stop - first + kThreads - 1) / kThreads; }

  template <class Visit>
  __device__ __forceinline__ void neighbours(Visit visit) const {
    const int from = first + threadIdx.x * run();
    for (int id = from; id < min(from + run(), stop); ++id) visit(logits[id], id);
  }
};

// A 64-bit sum in shared memory from 32-bit additions: the carry goes on by itself.
__device__ __forceinline__ void add_mass(unsigned long long& bin, int64_t mass) {
  uint32_t* part = reinterpret_cast<uint32_t*>(&bin);
  const uint32_t low = uint32_t(mass), before = atomicAdd(part, low);
  const uint32_t high = uint32_t(mass >> 32) + (before + low < before);
  if (high) atomicAdd(part + 1, high);
}

__device__ __forceinline__ void clear(Bins& bins) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  __syncthreads();
}

// Lowest id of the highest logit; NaN is never picked unless all are.
__device__ int find_peak(const Share& share, float& peak, int vocabulary) {
  uint64_t best = 0;
  share.each([&](float x, int id) {
    const uint64_t own = x == x ? uint64_t(sort_bits(x)) << 32 | (0xFFFFFFFFu - uint32_t(id)) : 0;
    best = own > best ? own : best;
  });
  best = cluster_max<kThreads>(best);
  peak = best ? from_sort_bits(uint32_t(best >> 32)) : -INFINITY;
  return best ? int(0xFFFFFFFFu - uint32_t(best)) : vocabulary - 1;
}

__device__ __forceinline__ int bin_of(const Nucleus& n, float logit) {
  return min(kBins - 1, int(__fmul_rn(__fmul_rn(__fsub_rn(n.peak, logit), n.inverse), kBinsPerUnit)));
}

// Sum of all bins.
__device__ int64_t sum_bins(const Bins& bins) {
  unsigned long long own = 0, all;
  for (int i = threadIdx.x; i < kBins; i += kThreads) own += bins[i];
  block_before<kThreads>(own, all);
  return int64_t(all);
}

// The logits that fall into bin `chosen`: the lowest and the highest, as sort bits.
__device__ void find_range(const Share& share, const Nucleus& n, int chosen, uint32_t& low, uint32_t& high) {
  uint64_t most = 0, least = 0;  // a key plus one, and the distance of a key from 2^32: no key gives zero
  share.each([&](float x, int) {
    if (n.mass(x) == 0 || bin_of(n, x) != chosen) return;
    const uint64_t key = sort_bits(x);
    most = key + 1 > most ? key + 1 : most;
    least = (1ull << 32) - key > least ? (1ull << 32) - key : least;
  });
  high = uint32_t(cluster_max<kThreads>(most) - 1);
  low = uint32_t((1ull << 32) - cluster_max<kThreads>(least));
}

// Narrow low .. high to the one logit at which the mass from the peak down passes `wanted`; `above` becomes the mass
// above it.
__device__ float narrow(const Share& share, const Nucleus& n, Bins& bins, int chosen, int64_t wanted, int64_t& above) {
  uint32_t low, high;
  find_range(share, n, chosen, low, high);
  while (high > low) {
    const int shift = max(0, 32 - __clz(high - low) - 11);
    clear(bins);
    share.each([&](float x, int) {
      const uint32_t key = sort_bits(x);
      const int64_t mass = key >= low && key <= high ? n.mass(x) : 0;
      if (mass > 0 && bin_of(n, x) == chosen) add_mass(bins[(high - key) >> shift], mass);
    });
    add_bins<kThreads>(bins);
    int part;
    unsigned long long before;
    find_bin<kThreads>(bins, static_cast<unsigned long long>(wanted - above), part, before);
    above += int64_t(before);
    high -= uint32_t(part) << shift;
    low = max(low, high - ((1u << shift) - 1));
  }
  return from_sort_bits(high);
}

// Cut the distribution to the nucleus of `top_p`.
__device__ void cut(const Share& share, Nucleus& n, Bins& bins, double top_p, int vocabulary) {
  clear(bins);
  share.each([&](float x, int) {
    const int64_t mass = n.mass(x);
    if (mass > 0) add_mass(bins[bin_of(n, x)], mass);
  });
  add_bins<kThreads>(bins);
  n.total = sum_bins(bins);
  n.least = -INFINITY;
  n.last = vocabulary - 1;
  if (top_p >= 1.0 || n.total == 0) return;
  // A token is kept if the mass before it is below top_p of all, which among integers is at most this.
  const int64_t wanted = min(max(int64_t(ceil(top_p * double(n.total))) - 1, int64_t(0)), n.total - 1);
  int chosen;
  unsigned long long before;
  find_bin<kThreads>(bins, static_cast<unsigned long long>(wanted), chosen, before);
  int64_t above = int64_t(before);
  n.least = narrow(share, n, bins, chosen, wanted, above);
  const int64_t each = n.mass(n.least), equals = (wanted - above) / each + 1;
  int64_t own = 0, all;
  share.neighbours([&](float x, int) { own += x == n.least; });
  int64_t number = cluster_before<kThreads>(own, all);
  uint64_t last = 0;
  share.neighbours([&](float x, int id) {
    if (x == n.least && ++number == equals) last = uint64_t(id);
  });
  n.last = int32_t(cluster_max<kThreads>(last));
  n.total = above + equals * each;
}

// The first id at which the running mass of the nucleus passes `mark`; only the thread that has it gets it, others -1.
__device__ int find_mark(const Share& share, const Nucleus& n, int64_t mark) {
  int64_t own = 0, all;
  share.neighbours([&](float x, int id) { own += n.kept(x, id); });
  int64_t sum = cluster_before<kThreads>(own, all);
  int found = -1;
  if (mark < sum || mark >= sum + own) return found;
  share.neighbours([&](float x, int id) {
    sum += n.kept(x, id);
    if (found < 0 && sum > mark) found = id;
  });
  return found;
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) sample_rows(const dsuf::SampleRows p) {
  using namespace dsuf;
  __shared__ Bins bins;
  const int64_t row = p.first + int64_t(blockIdx.y) * p.step;
  const bool live = int(blockIdx.y) < *p.live, leads = cluster_rank() == 0 && threadIdx.x == 0;
  const int slot = live ? p.row_slot[row] : -1;
  if (slot < 0 || slot >= p.turns) {
    if (leads) p.picked[row] = -1, p.peak[row] = p.least[row] = 0.0f, p.last[row] = 0, p.mass[row] = 0;
    return;
  }
  const double temperature = p.temperature[slot];
  const Share share(p.logits + row * p.vocabulary, p.vocabulary);
  Nucleus n;
  const int best = find_peak(share, n.peak, p.vocabulary);
  n.inverse = 1.0f;
  n.least = n.peak;
  n.last = best;
  n.total = 0;
  if (temperature > 0.0) {
    n.inverse = float(1.0 / temperature);
    cut(share, n, bins, p.top_p[slot], p.vocabulary);
  }
  const bool draws = temperature > 0.0 && p.purpose >= 0 && n.total > 0;
  if (leads) {
    if (!draws) p.picked[row] = best;
    p.peak[row] = n.peak;
    p.least[row] = n.least;
    p.last[row] = n.last;
    p.mass[row] = n.total;
  }
  if (!draws) return;
  const double draw = uniform(p.seed[slot], int64_t(p.row_position[row]) + 1, p.purpose);
  const int found = find_mark(share, n, draw_mark(draw, n.total));
  if (found >= 0) p.picked[row] = found;
}

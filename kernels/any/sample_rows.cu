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
#include "launch.cuh"
#include "nucleus.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kThreads = 512, kBins = 2048;
constexpr float kBinsPerUnit = 64.0f;
using Bins = unsigned long long[kBins];

// The row's logits, of which every thread of the cluster takes some.
struct Row {
  const float* logits;
  int vocabulary;

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 16
    for (int id = cluster_rank() * kThreads + threadIdx.x; id < vocabulary; id += kClusterBlocks * kThreads)
      visit(logits[id], id);
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
__device__ int find_peak(Mail& mail, int& turn, const Row& row, float& peak) {
  uint64_t best = 0;
  row.each([&](float x, int id) {
    const uint64_t own = x == x ? uint64_t(sort_bits(x)) << 32 | (0xFFFFFFFFu - uint32_t(id)) : 0;
    best = own > best ? own : best;
  });
  cluster_started();
  best = cluster_max<kThreads>(mail, turn, best);
  peak = best ? from_sort_bits(uint32_t(best >> 32)) : -INFINITY;
  return best ? int(0xFFFFFFFFu - uint32_t(best)) : row.vocabulary - 1;
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
__device__ void find_range(Mail& mail, int& turn, const Row& row, const Nucleus& n, int chosen, uint32_t& low,
                           uint32_t& high) {
  uint64_t most = 0, least = 0;  // a key plus one, and the distance of a key from 2^32: no key gives zero
  row.each([&](float x, int) {
    if (n.mass(x) == 0 || bin_of(n, x) != chosen) return;
    const uint64_t key = sort_bits(x);
    most = key + 1 > most ? key + 1 : most;
    least = (1ull << 32) - key > least ? (1ull << 32) - key : least;
  });
  high = uint32_t(cluster_max<kThreads>(mail, turn, most) - 1);
  low = uint32_t((1ull << 32) - cluster_max<kThreads>(mail, turn, least));
}

// Narrow low .. high to the one logit at which the mass from the peak down passes `wanted`; `above` becomes the mass
// above it.
__device__ float narrow(Mail& mail, int& turn, const Row& row, const Nucleus& n, Bins& bins, int chosen, int64_t wanted,
                        int64_t& above) {
  uint32_t low, high;
  find_range(mail, turn, row, n, chosen, low, high);
  while (high > low) {
    const int shift = max(0, 32 - __clz(high - low) - 11);
    clear(bins);
    row.each([&](float x, int) {
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

// Cut the distribution to the nucleus of `top_p`, which is below one.
__device__ void cut(Mail& mail, int& turn, const Row& row, Nucleus& n, Bins& bins, double top_p) {
  clear(bins);
  row.each([&](float x, int) {
    const int64_t mass = n.mass(x);
    if (mass > 0) add_mass(bins[bin_of(n, x)], mass);
  });
  add_bins<kThreads>(bins);
  const int64_t total = sum_bins(bins);
  if (total == 0) return;
  // A token is kept if the mass before it is below top_p of all, which among integers is at most this.
  const int64_t wanted = min(max(int64_t(ceil(top_p * double(total))) - 1, int64_t(0)), total - 1);
  int chosen;
  unsigned long long before;
  find_bin<kThreads>(bins, static_cast<unsigned long long>(wanted), chosen, before);
  int64_t above = int64_t(before), all;
  const float least = narrow(mail, turn, row, n, bins, chosen, wanted, above);
  const int64_t equals = (wanted - above) / n.mass(least) + 1;
  const int found = find_passing<kThreads>(
      mail, turn, row.vocabulary, [&](int id) { return int64_t(row.logits[id] == least); },
      [&](int64_t) { return equals - 1; }, all);
  n.least = least;
  n.last = int32_t(cluster_max<kThreads>(mail, turn, uint64_t(max(found, 0))));
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) sample_rows(const dsuf::SampleRows p) {
  using namespace dsuf;
  await_inputs();
  __shared__ Bins bins;
  __shared__ Mail mail;
  __shared__ double draw;
  const int64_t at = p.first + int64_t(blockIdx.y) * p.step;
  const bool live = int(blockIdx.y) < *p.live, leads = cluster_rank() == 0 && threadIdx.x == 0;
  const int slot = live ? p.row_slot[at] : -1;
  if (slot < 0 || slot >= p.turns) {
    if (leads) p.picked[at] = -1, p.peak[at] = p.least[at] = 0.0f, p.last[at] = 0, p.mass[at] = 0;
    return;
  }
  cluster_start();
  int turn = 0;
  const double temperature = p.temperature[slot], top_p = p.top_p[slot];
  const Row row{p.logits + at * p.vocabulary, p.vocabulary};
  if (threadIdx.x == kThreads - 1) draw = uniform(p.seed[slot], int64_t(p.row_position[at]) + 1, p.purpose);
  Nucleus n;
  const int best = find_peak(mail, turn, row, n.peak);
  const bool greedy = !(temperature > 0.0), draws = !greedy && p.purpose >= 0;
  n.inverse = greedy ? 1.0f : float(1.0 / temperature);
  n.least = greedy ? n.peak : -INFINITY;
  n.last = greedy ? best : p.vocabulary - 1;
  if (!greedy && top_p < 1.0) cut(mail, turn, row, n, bins, top_p);
  int64_t mass = 0;
  int found = -1;
  if (!greedy) {
    found = find_passing<kThreads>(
        mail, turn, p.vocabulary, [&](int id) { return n.kept(row.logits[id], id); },
        [&](int64_t all) { return draw_mark(draw, all); }, mass);
  }
  if (draws && found >= 0) p.picked[at] = found;
  if (!leads) return;
  if (!draws || mass == 0) p.picked[at] = best;
  p.peak[at] = n.peak;
  p.least[at] = n.least;
  p.last[at] = n.last;
  p.mass[at] = mass;
}

// Log-probabilities under the model's own distribution: of the likeliest tokens of a row, and of what was chosen.
//
//   total = log(sum over v of e^l_v);  logprob(v) = l_v - total
//
//   rank_logits  total and the `logprobs` likeliest tokens, the lower id first among equals; before any mask
//   rate_tokens  the log-probability of each kept draft, and of the token after them; behind the choice
//
// Shapes: RankLogits, RateTokens; at most 20 of the likeliest. A turn whose `logprobs` is negative asks for nothing. The
// sum is of integers (nucleus.cuh), so that it does not depend on an order; tokens below e^-36 of the likeliest count as
// nothing. The lists are in pinned host memory, a record a step, modulo result_steps; advance_turns, which comes later,
// announces them. rank_logits: a cluster of 8 blocks a row; each thread keeps the best that it has left, and who gave the
// last one looks again. Grid: rank_logits (8, rows), rate_tokens (ceil(batch * (block + 1) / 128), 1). Padding: untouched.
// Bound: latency of a cluster's barrier for each of the likeliest; 4 bytes a logit.
#include "cluster.cuh"
#include "contract.h"
#include "launch.cuh"
#include "nucleus.cuh"
#include "numeric.cuh"

namespace dsuf {

constexpr int kThreads = 512, kMost = 20, kPlaces = DSUF_BLOCK + 1;

// A token's rank as a number: the logit first, then the lower id; never zero.
__device__ __forceinline__ uint64_t key_of(float logit, int id) {
  return uint64_t(sort_bits(logit)) << 32 | (0xFFFFFFFFu - uint32_t(id));
}

// Of the thread's share of the row the best below `limit`; zero: there is none.
__device__ uint64_t find_best(const float* logits, int vocabulary, uint64_t limit) {
  uint64_t best = 0;
#pragma unroll 16
  for (int id = cluster_rank() * kThreads + threadIdx.x; id < vocabulary; id += kClusterBlocks * kThreads) {
    const float x = logits[id];
    const uint64_t key = x == x ? key_of(x, id) : 0;
    best = key < limit && key > best ? key : best;
  }
  return best;
}

__device__ double find_total(Mail& mail, int& turn, const float* logits, int vocabulary, float peak) {
  const Nucleus whole{peak, -INFINITY, 1.0f, vocabulary - 1, 0.0};
  int64_t own = 0, all;
#pragma unroll 16
  for (int id = cluster_rank() * kThreads + threadIdx.x; id < vocabulary; id += kClusterBlocks * kThreads)
    own += whole.mass(logits[id]);
  cluster_before<kThreads>(mail, turn, own, all);
  return double(peak) + log(double(all) / double(kMassScale));
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) rank_logits(const dsuf::RankLogits p) {
  using namespace dsuf;
  await_inputs();
  __shared__ Mail mail;
  const int row = blockIdx.y, slot = row < *p.live ? p.row_slot[row] : -1;
  const int wanted = slot >= 0 && slot < p.turns ? p.logprobs[slot] : -1;
  if (wanted < 0) return;
  cluster_start();
  const float* logits = p.logits + int64_t(row) * p.vocabulary;
  uint64_t own = find_best(logits, p.vocabulary, ~0ull);
  int turn = 0;
  cluster_started();
  uint64_t best = cluster_max<kThreads>(mail, turn, own);
  const double total = find_total(mail, turn, logits, p.vocabulary, from_sort_bits(uint32_t(best >> 32)));
  const bool leads = cluster_rank() == 0 && threadIdx.x == 0;
  if (leads) p.total[row] = total;
  const int64_t at = (*p.step % p.result_steps * p.most_rows + row) * kMost;
  for (int i = 0; i < min(min(wanted, kMost), p.vocabulary); ++i) {
    if (i) best = cluster_max<kThreads>(mail, turn, own);
    if (own == best) own = find_best(logits, p.vocabulary, best);
    if (!leads) continue;
    p.likeliest[at + i] = int(0xFFFFFFFFu - uint32_t(best));
    p.likeliest_logprobs[at + i] = float(double(from_sort_bits(uint32_t(best >> 32))) - total);
  }
  if (leads) __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(128) rate_tokens(const dsuf::RateTokens p) {
  using namespace dsuf;
  await_inputs();
  const int at = blockIdx.x * 128 + threadIdx.x, b = at / kPlaces, place = at % kPlaces;
  const int slot = b < min(*p.live, p.batch) ? p.turn[b] : -1;
  if (slot < 0 || slot >= p.turns || p.logprobs[slot] < 0) return;
  const int kept = p.kept ? p.kept[b] : 0, row = p.first ? p.first[b] + place : b;
  if (place > kept) return;
  const int id = place < kept ? p.row_id[row + 1] : p.next[b];
  if (id < 0 || id >= p.vocabulary) return;
  const double logit = p.logits[int64_t(row) * p.vocabulary + id];
  p.chosen_logprobs[*p.step % p.result_steps * p.most_rows + row] = float(logit - p.total[row]);
  __threadfence_system();
}

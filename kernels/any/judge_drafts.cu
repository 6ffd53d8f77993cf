// Which drafts are kept, and the token after them, such that drafted output has the target's own distribution.
//
//   greedy       drafts are kept while they are the target's arg-max; its arg-max follows
//   token rule   draft r is kept while u_r * q_r(d_r) < p_r(d_r)            (Leviathan et al. 2023, Chen et al. 2023)
//   block rule   the longest prefix with u_(i-1) <= R_i / (R_i + 1 - w_i), of all drafts w_k       (Sun et al. 2024)
//                w_i = min(1, w_(i-1) p_(i-1)(d) / q_(i-1)(d)),  R_i = sum over v of max(w_i p_i(v) - q_i(v), 0)
//   then         a draw from max(w p_n - q_n, 0), or from p_n if all are kept or nothing is left over
//
//   weigh_drafts  R_i, block rule only; a cluster a place
//   judge_drafts  kept and next; a cluster a turn
//
// Shapes: JudgeDrafts. p and q are nuclei (nucleus.cuh) as SampleRows found them. Differences of probabilities are
// integers in 2^-62, so their sums do not depend on an order. Grid: weigh_drafts (8, batch * block), judge_drafts (8,
// batch). Padding: kept 0, next -1. Bound: 8 bytes a logit and place, read from the cache.
#include "cluster.cuh"
#include "contract.h"
#include "nucleus.cuh"

namespace dsuf {

constexpr int kThreads = 512, kBlock = DSUF_BLOCK;

// A turn of the launch: its slot, its first verified row and how many drafts were looked at.
struct Judged {
  int slot, row, drafts;
  float inverse;

  __device__ Judged(const JudgeDrafts& p, int b) {
    slot = b < *p.live ? p.turn[b] : -1;
    row = slot < 0 ? 0 : p.first[b];
    drafts = slot < 0 ? 0 : min(p.verified[b], kBlock);
    const double temperature = slot < 0 ? 0.0 : p.temperature[slot];
    inverse = temperature > 0.0 ? float(1.0 / temperature) : 0.0f;  // 0: greedy
  }
  __device__ Nucleus target(const JudgeDrafts& p, int r) const {
    return {p.peak[row + r], p.least[row + r], inverse, p.last[row + r], p.mass[row + r]};
  }
  __device__ Nucleus draft(const JudgeDrafts& p, int b, int r) const {
    const int at = b * kBlock + r;
    return {p.draft_peak[at], p.draft_least[at], inverse, p.draft_last[at], p.draft_mass[at]};
  }
  __device__ const float* target_logits(const JudgeDrafts& p, int r) const {
    return p.logits + int64_t(row + r) * p.vocabulary;
  }
  __device__ const float* draft_logits(const JudgeDrafts& p, int b, int r) const {
    return p.draft_logits + int64_t(b * kBlock + r) * p.vocabulary;
  }
  // Probabilities of draft r under target and draft.
  __device__ void odds(const JudgeDrafts& p, int b, int r, double& target_p, double& draft_p) const {
    const int id = p.drafts[b * kBlock + r];
    target_p = target(p, r).probability(target_logits(p, r)[id], id);
    draft_p = draft(p, b, r).probability(draft_logits(p, b, r)[id], id);
  }
};

// w after `count` drafts.
__device__ double prefix_weight(const JudgeDrafts& p, const Judged& turn, int b, int count) {
  double w = 1.0;
  for (int r = 0; r < count; ++r) {
    double target, draft;
    turn.odds(p, b, r, target, draft);
    w = fmin(1.0, __ddiv_rn(__dmul_rn(w, target), draft));
  }
  return w;
}

__device__ __forceinline__ double accept_draw(const JudgeDrafts& p, const Judged& turn, int r) {
  return uniform(p.seed[turn.slot], int64_t(p.length[turn.slot]) + 1 + r, kAccept);
}

__device__ int keep_greedy(const JudgeDrafts& p, const Judged& turn, int b) {
  int kept = 0;
  while (kept < turn.drafts && p.picked[turn.row + kept] == p.drafts[b * kBlock + kept]) ++kept;
  return kept;
}

__device__ int keep_by_token(const JudgeDrafts& p, const Judged& turn, int b) {
  for (int r = 0; r < turn.drafts; ++r) {
    double target, draft;
    turn.odds(p, b, r, target, draft);
    if (!(__dmul_rn(accept_draw(p, turn, r), draft) < target)) return r;
  }
  return turn.drafts;
}

__device__ int keep_by_block(const JudgeDrafts& p, const Judged& turn, int b) {
  int kept = 0;
  double w = 1.0;
  for (int i = 1; i <= turn.drafts; ++i) {
    double target, draft;
    turn.odds(p, b, i - 1, target, draft);
    w = fmin(1.0, __ddiv_rn(__dmul_rn(w, target), draft));
    double chance = w;
    if (i < turn.drafts) {
      const double over = double(p.over[b * kBlock + i]) / kShareScale, below = over + 1.0 - w;
      chance = below > 0.0 ? __ddiv_rn(over, below) : 1.0;
    }
    if (accept_draw(p, turn, i - 1) <= chance) kept = i;
  }
  return kept;
}

// What `weight` times the target has over the draft at place r, token by token, in 2^-62.
struct Excess {
  Nucleus target, draft;
  const float *target_logits, *draft_logits;
  double weight;

  __device__ __forceinline__ int64_t of(int id) const {
    const double p = target.probability(target_logits[id], id), q = draft.probability(draft_logits[id], id);
    return __double2ll_rn(__dmul_rn(fmax(__dsub_rn(__dmul_rn(weight, p), q), 0.0), kShareScale));
  }
};

__device__ Excess excess_at(const JudgeDrafts& p, const Judged& turn, int b, int r, double weight) {
  return {turn.target(p, r), turn.draft(p, b, r), turn.target_logits(p, r), turn.draft_logits(p, b, r), weight};
}

__device__ __forceinline__ void share_of(int vocabulary, int& first, int& stop) {
  const int each = (vocabulary + kClusterBlocks - 1) / kClusterBlocks;
  first = min(cluster_rank() * each, vocabulary);
  stop = min(first + each, vocabulary);
}

// The first id at which the running sum of of(id) passes `draw` of the whole, by the one thread that has it (others
// -1); -2 for all if the whole is zero.
template <class Of>
__device__ int find_draw(int vocabulary, double draw, Of of) {
  int first, stop;
  share_of(vocabulary, first, stop);
  const int run = (stop - first + kThreads - 1) / kThreads, from = first + threadIdx.x * run;
  int64_t own = 0, all;
  for (int id = from; id < min(from + run, stop); ++id) own += of(id);
  int64_t sum = cluster_before<kThreads>(own, all);
  if (all == 0) return -2;
  const int64_t mark = draw_mark(draw, all);
  if (mark < sum || mark >= sum + own) return -1;
  for (int id = from; id < min(from + run, stop); ++id) {
    sum += of(id);
    if (sum > mark) return id;
  }
  return -1;
}

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) weigh_drafts(const dsuf::JudgeDrafts p) {
  using namespace dsuf;
  const int b = blockIdx.y / kBlock, i = blockIdx.y % kBlock;
  const Judged turn(p, b);
  if (i == 0 || i >= turn.drafts || turn.inverse == 0.0f) return;
  __shared__ double weight;
  if (threadIdx.x == 0) weight = prefix_weight(p, turn, b, i);
  __syncthreads();
  const Excess excess = excess_at(p, turn, b, i, weight);
  int first, stop;
  share_of(p.vocabulary, first, stop);
  int64_t own = 0, all;
#pragma unroll 4
  for (int id = first + threadIdx.x; id < stop; id += kThreads) own += excess.of(id);
  cluster_before<kThreads>(own, all);
  if (cluster_rank() == 0 && threadIdx.x == 0) p.over[b * kBlock + i] = all;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) judge_drafts(const dsuf::JudgeDrafts p) {
  using namespace dsuf;
  __shared__ int shared_kept;
  __shared__ double shared_weight;
  const int b = blockIdx.y;
  const bool leads = cluster_rank() == 0 && threadIdx.x == 0;
  const Judged turn(p, b);
  if (turn.slot < 0) {
    if (leads) p.kept[b] = 0, p.next[b] = -1;
    return;
  }
  if (turn.inverse == 0.0f) {
    if (leads) {
      const int kept = keep_greedy(p, turn, b);
      p.kept[b] = kept;
      p.next[b] = p.picked[turn.row + kept];
    }
    return;
  }
  if (threadIdx.x == 0) {
    shared_kept = p.rule ? keep_by_block(p, turn, b) : keep_by_token(p, turn, b);
    shared_weight = p.rule ? prefix_weight(p, turn, b, shared_kept) : 1.0;
  }
  __syncthreads();
  const int kept = shared_kept;
  const bool all_kept = kept == turn.drafts;
  const double draw =
      uniform(p.seed[turn.slot], int64_t(p.length[turn.slot]) + 1 + kept, all_kept ? kToken : kResidual);
  int found = -2;
  if (!all_kept) {
    const Excess excess = excess_at(p, turn, b, kept, shared_weight);
    found = find_draw(p.vocabulary, draw, [&](int id) { return excess.of(id); });
  }
  if (found == -2) {
    const Nucleus target = turn.target(p, kept);
    const float* logits = turn.target_logits(p, kept);
    found = find_draw(p.vocabulary, draw, [&](int id) { return target.kept(logits[id], id); });
  }
  if (leads) p.kept[b] = kept;
  if (found >= 0) p.next[b] = found;
  if (found == -2 && leads) p.next[b] = p.picked[turn.row + kept];
}

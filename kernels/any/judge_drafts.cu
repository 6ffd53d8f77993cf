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
#include "launch.cuh"
#include "nucleus.cuh"

namespace dsuf {

constexpr int kThreads = 512, kBlock = DSUF_BLOCK;
static_assert(kBlock < 32, "a warp has a lane a draft");

__device__ __forceinline__ double unit_of(int64_t mass) { return mass > 0 ? 1.0 / double(mass) : 0.0; }

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
    return {p.peak[row + r], p.least[row + r], inverse, p.last[row + r], unit_of(p.mass[row + r])};
  }
  __device__ Nucleus draft(const JudgeDrafts& p, int b, int r) const {
    const int at = b * kBlock + r;
    return {p.draft_peak[at], p.draft_least[at], inverse, p.draft_last[at], unit_of(p.draft_mass[at])};
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

// Of each draft its probabilities and the number that decides over it, and the number for a token after it or in its
// place. A thread each, so that no memory is waited for twice.
struct Odds {
  double target[kBlock], draft[kBlock], ratio[kBlock], accept[kBlock], follow[kBlock + 1];

  __device__ void find(const JudgeDrafts& p, const Judged& turn, int b) {
    const int r = threadIdx.x % 32, job = threadIdx.x / 32;
    const int64_t position = int64_t(p.length[turn.slot]) + 1 + r;
    if (job == 0 && r < turn.drafts) {
      turn.odds(p, b, r, target[r], draft[r]);
      ratio[r] = __ddiv_rn(target[r], draft[r]);
    }
    if (job == 1 && r < turn.drafts) accept[r] = uniform(p.seed[turn.slot], position, kAccept);
    if (job == 2 && r <= turn.drafts)
      follow[r] = uniform(p.seed[turn.slot], position, r == turn.drafts ? kToken : kResidual);
    __syncthreads();
  }

  // w after `count` drafts.
  __device__ double weight(int count) const {
    double w = 1.0;
    for (int r = 0; r < count; ++r) w = fmin(1.0, __dmul_rn(w, ratio[r]));
    return w;
  }
};

__device__ int keep_greedy(const JudgeDrafts& p, const Judged& turn, int b) {
  int kept = 0;
  while (kept < turn.drafts && p.picked[turn.row + kept] == p.drafts[b * kBlock + kept]) ++kept;
  return kept;
}

__device__ int keep_by_token(const Odds& odds, const Judged& turn) {
  for (int r = 0; r < turn.drafts; ++r)
    if (!(__dmul_rn(odds.accept[r], odds.draft[r]) < odds.target[r])) return r;
  return turn.drafts;
}

__device__ int keep_by_block(const JudgeDrafts& p, const Odds& odds, const Judged& turn, int b) {
  int kept = 0;
  double w = 1.0;
  for (int i = 1; i <= turn.drafts; ++i) {
    w = fmin(1.0, __dmul_rn(w, odds.ratio[i - 1]));
    // The chance is over / below, and certain where nothing is below.
    const bool last = i == turn.drafts;
    const double over = last ? w : __dmul_rn(double(p.over[b * kBlock + i]), 1.0 / kShareScale);
    const double below = last ? 1.0 : __dsub_rn(__dadd_rn(over, 1.0), w);
    if (__dmul_rn(odds.accept[i - 1], below) <= over) kept = i;
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

}  // namespace dsuf

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) weigh_drafts(const dsuf::JudgeDrafts p) {
  using namespace dsuf;
  await_inputs();
  const int b = blockIdx.y / kBlock, i = blockIdx.y % kBlock;
  const Judged turn(p, b);
  if (i == 0 || i >= turn.drafts || turn.inverse == 0.0f) return;
  __shared__ Mail mail;
  __shared__ Odds odds;
  cluster_start();
  odds.find(p, turn, b);
  const Excess excess = excess_at(p, turn, b, i, odds.weight(i));
  int64_t own = 0, all;
#pragma unroll 8
  for (int id = blockIdx.x * kThreads + threadIdx.x; id < p.vocabulary; id += kClusterBlocks * kThreads)
    own += excess.of(id);
  int exchange = 0;
  cluster_started();
  cluster_before<kThreads>(mail, exchange, own, all);
  if (cluster_rank() == 0 && threadIdx.x == 0) p.over[b * kBlock + i] = all;
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(512) judge_drafts(const dsuf::JudgeDrafts p) {
  using namespace dsuf;
  await_inputs();
  __shared__ Mail mail;
  __shared__ Odds odds;
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
  odds.find(p, turn, b);
  const int kept = p.rule ? keep_by_block(p, odds, turn, b) : keep_by_token(odds, turn);
  const bool all_kept = kept == turn.drafts;
  const double draw = odds.follow[kept];
  int exchange = 0;
  cluster_sync();
  const auto mark = [&](int64_t all) { return draw_mark(draw, all); };
  int found = -1;
  int64_t all = 0;
  if (!all_kept) {
    const Excess excess = excess_at(p, turn, b, kept, p.rule ? odds.weight(kept) : 1.0);
    found = find_passing<kThreads>(
        mail, exchange, p.vocabulary, [&](int id) { return excess.of(id); }, mark, all);
  }
  if (all == 0) {
    const Nucleus target = turn.target(p, kept);
    const float* logits = turn.target_logits(p, kept);
    found = find_passing<kThreads>(
        mail, exchange, p.vocabulary, [&](int id) { return target.kept(logits[id], id); }, mark, all);
  }
  if (leads) p.kept[b] = kept;
  if (found >= 0) p.next[b] = found;
  if (all == 0 && leads) p.next[b] = p.picked[turn.row + kept];
}

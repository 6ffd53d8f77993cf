// The end of a step: what each turn hands out, whether it has ended, its new state, and the record that the host reads.
//
//   ids = kept drafts, then the next token; handed out: those before the first end-of-sentence token and within
//   max_tokens; a turn ends by either. The cache then ends before the next anchor, or after what was handed out.
//
// Shapes: AdvanceTurns; one block of 1024, a thread a turn. A record of `results` (step modulo result_steps) has rows
// of 6 + block + 1 numbers: row 0 the number of turns; then a turn each: slot, ids handed out, done, drafts verified,
// drafts handed out, new length, and the ids. `results` and `sequence` may be pinned host memory: the sequence number
// is written after everything else has arrived. Bound: latency.
#include "contract.h"
#include "launch.cuh"

namespace dsuf {

constexpr int kBlock = DSUF_BLOCK, kRecord = 6 + kBlock + 1;

// Id i of those that a turn has got: kept drafts, then the next token.
__device__ __forceinline__ int id_of(const AdvanceTurns& p, int b, int kept, int i) {
  return i < kept ? p.drafts[b * kBlock + i] : p.next[b];
}

// How many ids are handed out, and why the turn ends: 0 not, 1 end of sentence, 2 max_tokens.
__device__ int hand_out(const AdvanceTurns& p, int b, int kept, int room, int& ends) {
  const int most = min(kept + 1, room);
  ends = 0;
  for (int i = 0; i < most; ++i)
    if (id_of(p, b, kept, i) == p.eos_id) {
      ends = 1;
      return i;
    }
  if (most >= room) ends = 2;
  return most;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(1024) advance_turns(const dsuf::AdvanceTurns p) {
  using namespace dsuf;
  await_inputs();
  const int b = threadIdx.x, live = min(*p.live, p.batch);
  const int64_t step = *p.step, at = step % p.result_steps;
  int32_t* record = p.results + at * (p.batch + 1) * kRecord;
  __syncthreads();
  const int slot = b < live ? p.turn[b] : -1;
  if (slot >= 0 && slot < p.turns) {
    const int kept = p.kept ? p.kept[b] : 0, start = p.length[slot], verified = p.verified ? p.verified[b] : 0;
    int ends;
    const int given = hand_out(p, b, kept, p.max_tokens[slot] - p.generated[slot], ends);
    const int length = start + p.fed + min(given, kept);
    p.length[slot] = length;
    p.anchor[slot] = p.next[b];
    p.generated[slot] += given;
    p.done[slot] = ends;
    if (p.feed_place && p.first)
      for (int i = 0; i <= verified; ++i)
        p.feed_place[p.first[b] + i] = start + i < length ? int64_t(slot) * p.ring + (start + i) % p.ring : -1;
    int32_t* own = record + (b + 1) * kRecord;
    own[0] = slot, own[1] = given, own[2] = ends, own[3] = verified, own[4] = min(given, kept), own[5] = length;
    for (int i = 0; i <= kept; ++i) own[6 + i] = id_of(p, b, kept, i);
  }
  if (b == 0) record[0] = live;
  __threadfence_system();
  __syncthreads();
  if (b == 0) {
    *p.step = step + 1;
    __threadfence_system();
    *reinterpret_cast<volatile int64_t*>(p.sequence + at) = step + 1;
  }
}

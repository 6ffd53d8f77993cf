// Sort the (row, pick) pairs of a step by expert, so that each expert in use is read once.
//
// Shapes: GroupExperts; experts <= 1024. One block of 1024; a thread an expert walks all pairs, which is meant for the
// few pairs of a decode step. The order is by expert, then by pair number, whatever the timing. Padding pairs carry a
// negative expert and are left out.
// Bound: latency, one pass over the pairs for the counts and one for the order.
#include "contract.h"

extern "C" __global__ void __launch_bounds__(1024) group_experts(const dsuf::GroupExperts p) {
  __shared__ int load[1024], begin[1024], slot[1024];
  __shared__ int pairs_total, used_total;
  const int e = threadIdx.x, pairs = p.rows * p.picks;
  int mine = 0;
  if (e < p.experts)
    for (int i = 0; i < pairs; ++i) mine += p.chosen[i] == e;
  load[e] = mine;
  __syncthreads();
  if (e == 0) {
    int sum = 0, used = 0;
    for (int i = 0; i < p.experts; ++i) {
      begin[i] = sum;
      slot[i] = used;
      sum += load[i];
      used += load[i] > 0;
    }
    pairs_total = sum;
    used_total = used;
    *p.used = used;
  }
  __syncthreads();
  if (e < p.experts && mine > 0) {
    p.expert[slot[e]] = e;
    p.first[slot[e]] = begin[e];
    int at = begin[e];
    for (int i = 0; i < pairs; ++i)
      if (p.chosen[i] == e) p.order[at++] = i;
  }
  for (int i = used_total + e; i <= p.experts; i += 1024) {
    if (i < p.experts) p.expert[i] = -1;
    p.first[i] = pairs_total;
  }
  for (int i = pairs_total + e; i < pairs; i += 1024) p.order[i] = -1;
}

// Sort the (row, pick) pairs of a step by expert (group.cuh), where route_experts has not done it itself.
//
// Shapes: GroupExperts; experts <= 1024. One block of 512. Padding pairs carry a negative expert and are left out.
// Bound: latency.
#include "contract.h"
#include "group.cuh"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(512) group_experts(const dsuf::GroupExperts p) {
  using namespace dsuf;
  await_inputs();
  __shared__ GroupRoom room;
  group({p.chosen, p.used, p.expert, p.first, p.order, p.rows * p.picks, p.experts}, room);
}

// The second half of the routed experts: out = bf16(w2 inner), a row for every (row, pick) pair.
//
// Shapes: ExpertsDown; alignment, order of sums and padding as in experts_up; dim a multiple of 16. Grid: (dim / 16,
// slots). Bound: bytes, dim * inter * 17 / 32 an expert in use.
#include "contract.h"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256) experts_down(const dsuf::ExpertsDown p) {
  using namespace dsuf;
  static_assert(DSUF_DIM % 16 == 0, "a block has sixteen outputs");
  constexpr int kGroups = DSUF_INTER / 32;
  const int slot = blockIdx.y, lane = threadIdx.x % 32, first = blockIdx.x * 16;
  if (slot >= *p.used) return;
  const int64_t output = int64_t(p.expert[slot]) * DSUF_DIM + first + lane / 4;
  const uint8_t* low = p.w2 + output * (DSUF_INTER / 2) + lane % 4 * 4;
  for (int at = p.first[slot], stop = p.first[slot + 1]; at < stop; at += 8) {
    const int own = at + lane / 4, even = at + lane % 4 * 2;
    const uint8_t* x = own < stop ? p.codes + int64_t(p.order[own]) * DSUF_INTER + lane % 4 * 8 : nullptr;
    const uint8_t* even_scale = even < stop ? p.scales + int64_t(p.order[even]) * kGroups : nullptr;
    const uint8_t* odd_scale = even + 1 < stop ? p.scales + int64_t(p.order[even + 1]) * kGroups : nullptr;
    float total[4] = {};
    multiply_fp4<DSUF_INTER, 8>(total, low, p.w2_scale + output * kGroups, x, even_scale, odd_scale);
    const float sum = sum_tiles<8>(total);
    const int mine = at + threadIdx.x % 8;
    if (threadIdx.x < 128 && mine < stop)
      p.out[int64_t(p.order[mine]) * DSUF_DIM + first + threadIdx.x / 8] = bf16_bits(sum);
  }
}

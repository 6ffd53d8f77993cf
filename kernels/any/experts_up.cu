// The first half of the routed experts: both FP4 projections, SwiGLU, and the routing weight.
//
//   a = bf16(w1 x), b = bf16(w3 x);   inner = bf16(silu(min(a, limit)) * clamp(b, limit) * weight)
//
// Shapes: ExpertsUp; rows of codes 8-byte, of weights 4-byte aligned; inter a multiple of 16. The pairs of an expert
// are taken eight at a time, each of 8 warps sums every eighth group, then the warps are added in order: a pair's
// result depends on nothing but its row. Grid: (inter / 16, slots), slots >= distinct experts. Padding is never routed.
// Bound: bytes, 2 * inter * dim * 17 / 32 an expert in use.
#include "contract.h"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256) experts_up(const dsuf::ExpertsUp p) {
  using namespace dsuf;
  static_assert(DSUF_INTER % 16 == 0, "a block has sixteen outputs");
  constexpr int kGroups = DSUF_DIM / 32;
  const int slot = blockIdx.y, lane = threadIdx.x % 32, first = blockIdx.x * 16;
  if (slot >= *p.used) return;
  const int64_t output = int64_t(p.expert[slot]) * DSUF_INTER + first + lane / 4;
  const int64_t offset = output * (DSUF_DIM / 2) + lane % 4 * 4;
  for (int at = p.first[slot], stop = p.first[slot + 1]; at < stop; at += 8) {
    const int own = at + lane / 4, even = at + lane % 4 * 2;
    const uint8_t* x =
        own < stop ? p.codes + int64_t(p.order[own] / p.picks) * DSUF_DIM + lane % 4 * 8 : nullptr;
    const uint8_t* even_scale = even < stop ? p.scales + int64_t(p.order[even] / p.picks) * kGroups : nullptr;
    const uint8_t* odd_scale = even + 1 < stop ? p.scales + int64_t(p.order[even + 1] / p.picks) * kGroups : nullptr;
    float gate[4] = {}, up[4] = {};
    multiply_fp4<DSUF_DIM, 8>(gate, p.w1 + offset, p.w1_scale + output * kGroups, x, even_scale, odd_scale);
    multiply_fp4<DSUF_DIM, 8>(up, p.w3 + offset, p.w3_scale + output * kGroups, x, even_scale, odd_scale);
    const float a = round_bf16(sum_tiles<8>(gate)), b = round_bf16(sum_tiles<8>(up));
    const int mine = at + threadIdx.x % 8;
    if (threadIdx.x < 128 && mine < stop) {
      const int pair = p.order[mine];
      const float weighted = __fmul_rn(swiglu(a, b), p.weights[pair]);
      p.inner[int64_t(pair) * DSUF_INTER + first + threadIdx.x / 8] = bf16_bits(weighted);
    }
  }
}

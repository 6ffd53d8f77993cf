// The draft head's sequential part: what the token before does to the logits of a draft, and how sure the head is.
//
//   add_markov    logits[b, place] += head . embed[token before]; the anchor's at place 0, else the draft before
//   rate_drafts   confidence[b, i] = weight . (bf16 collapse of the last stage's streams, embed[token before])
//
// Shapes: AddMarkov, RateDrafts; rank and dim multiples of 32. The bias is a float32 product on the tensor cores, added
// once. Grid: add_markov (ceil(vocabulary / 128), ceil(batch / 8)), 8 warps, sixteen tokens each; rate_drafts a block
// of 256 a row, float64 sums. Padding: not touched; confidence zero.
// Bound: the head's bytes, 2 * rank a token of the vocabulary (66 MB), and 8 a logit.
#include "contract.h"
#include "launch.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

namespace dsuf {

constexpr int kRank = DSUF_MARKOV_RANK, kBlock = DSUF_BLOCK, kGroups = kRank / 32;
static_assert(kRank % 32 == 0, "the contraction is whole groups of 32");

// The token before place `place` of block `b`.
__device__ __forceinline__ int token_before(const int32_t* anchors, const int32_t* drafts, int b, int place) {
  return place ? drafts[b * kBlock + place - 1] : anchors[b * kBlock];
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(256) add_markov(const dsuf::AddMarkov p) {
  using namespace dsuf;
  await_inputs();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, live = min(*p.live, p.batch);
  const int first = blockIdx.x * 128 + warp * 16, turn0 = blockIdx.y * 8, turn = turn0 + lane / 4, part = lane % 4 * 8;
  if (turn0 >= live || first >= p.vocabulary) return;
  const int last = p.vocabulary - 1;
  const uint16_t* low = p.head + int64_t(min(first + lane / 4, last)) * kRank + part;
  const uint16_t* high = p.head + int64_t(min(first + lane / 4 + 8, last)) * kRank + part;
  const int before = turn < live ? token_before(p.anchors, p.drafts, turn, p.place) : -1;
  const uint16_t* x = p.embed + int64_t(max(before, 0)) * kRank + part;
  float sum[4] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint4 a = *reinterpret_cast<const uint4*>(low + g * 32), b = *reinterpret_cast<const uint4*>(high + g * 32);
    const uint4 v = before >= 0 ? *reinterpret_cast<const uint4*>(x + g * 32) : make_uint4(0, 0, 0, 0);
    mma_bf16(sum, a.x, b.x, a.y, b.y, v.x, v.y);
    mma_bf16(sum, a.z, b.z, a.w, b.w, v.z, v.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int b = turn0 + lane % 4 * 2 + i % 2, token = first + lane / 4 + i / 2 * 8;
    if (b >= live || token > last) continue;
    float* logit = p.logits + (int64_t(b) * kBlock + p.place) * p.vocabulary + token;
    *logit = __fadd_rn(*logit, sum[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256) rate_drafts(const dsuf::RateDrafts p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kStreams = DSUF_STREAMS, kDim = DSUF_DIM;
  const int b = blockIdx.x / kBlock, place = blockIdx.x % kBlock;
  const int64_t row = blockIdx.x;
  if (b >= *p.live) {
    if (threadIdx.x == 0) p.confidence[row] = 0.0f;
    return;
  }
  double sum = 0.0;
  for (int i = threadIdx.x; i < kDim; i += 256) {
    float h = 0.0f;
    for (int s = 0; s < kStreams; ++s)
      h = __fadd_rn(h, __fmul_rn(p.pre[row * kStreams + s], bf16_value(p.streams[(row * kStreams + s) * kDim + i])));
    sum += double(round_bf16(h)) * double(p.weight[i]);
  }
  const int before = token_before(p.anchors, p.drafts, b, place);
  for (int i = threadIdx.x; i < kRank && before >= 0; i += 256)
    sum += double(bf16_value(p.embed[int64_t(before) * kRank + i])) * double(p.weight[kDim + i]);
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0) p.confidence[row] = float(sum);
}

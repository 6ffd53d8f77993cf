// What may come, as the host knows it: a question a step, its answer, and the tokens that it rules out.
//
//   ask_masks    of every turn its last tokens and its drafts, for the host, which works while the layers run
//   await_masks  until the answer is there
//   mask_logits  logits[row, id] = -infinity where bit id of the place's mask is not set
//
// Shapes: AskMasks, AwaitMasks, MaskLogits; at most 1024 turns. A question has rows of 4 + 2 * block numbers: in row 0
// the number of turns; then a turn each: slot, length, drafts that are verified, the tokens at the `block` positions
// before the anchor (-1: none), the anchor, the drafts. Questions, masks and answers are in pinned host memory, which the
// host writes anew only after a step's question, so that they need no ring. Without rules (`*ruled` 0) none of the three
// does anything. A host that does not answer in time is named in `late`, and the step goes on without masks. Grid:
// ask_masks one block of 1024, await_masks of 32; mask_logits (ceil(words / 256), batch * (block + 1)), a warp for 32
// words. Padding: untouched. Bound: the host's answer; then the bytes of the masks over its link.
#include "contract.h"
#include "launch.cuh"

namespace dsuf {

constexpr int kBlock = DSUF_BLOCK, kPlaces = kBlock + 1, kQuestion = 4 + 2 * kBlock, kWords = 32;

__device__ __forceinline__ uint64_t clock_us() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns / 1000;
}

__device__ __forceinline__ int64_t load_acquire(const int64_t* at) {
  int64_t value;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// What the host has written meanwhile, past every cache.
__device__ __forceinline__ int32_t load_host(const int32_t* from) {
  return *const_cast<const volatile int32_t*>(from);
}

__device__ void write_question(const AskMasks& p, int b, int slot, int32_t* own) {
  const int length = p.length[slot], verified = p.verified ? min(p.verified[b], kBlock) : 0;
  own[0] = slot, own[1] = length, own[2] = verified;
  for (int i = 0; i < kBlock; ++i) {
    const int position = length - kBlock + i;
    own[3 + i] = position >= 0 ? p.ids[int64_t(slot) * p.ring + position % p.ring] : -1;
  }
  own[3 + kBlock] = p.anchor[slot];
  for (int i = 0; i < kBlock; ++i) own[4 + kBlock + i] = i < verified && p.drafts ? p.drafts[b * kBlock + i] : -1;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(1024) ask_masks(const dsuf::AskMasks p) {
  using namespace dsuf;
  await_inputs();
  if (*p.ruled == 0) return;
  const int b = threadIdx.x, live = min(*p.live, p.batch), slot = b < live ? p.turn[b] : -1;
  if (slot >= 0 && slot < p.turns) write_question(p, b, slot, p.questions + (b + 1) * kQuestion);
  if (b == 0) p.questions[0] = live;
  __threadfence_system();
  __syncthreads();
  if (b == 0) *const_cast<volatile int64_t*>(p.asked) = *p.step + 1;
}

extern "C" __global__ void __launch_bounds__(32) await_masks(const dsuf::AwaitMasks p) {
  using namespace dsuf;
  await_inputs();
  if (*p.ruled == 0 || threadIdx.x) return;
  const int64_t wanted = *p.step + 1;
  const uint64_t deadline = clock_us() + uint64_t(p.patience_us);
  while (load_acquire(p.answered) < wanted) {
    if (clock_us() > deadline) {
      *const_cast<volatile int32_t*>(p.late) = 1;
      break;
    }
    __nanosleep(1000);
  }
  __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(256) mask_logits(const dsuf::MaskLogits p) {
  using namespace dsuf;
  await_inputs();
  const int at = blockIdx.y, b = at / kPlaces, place = at % kPlaces;
  if (*p.ruled == 0 || b >= min(*p.live, p.batch) || place > (p.verified ? p.verified[b] : 0)) return;
  if (load_host(p.masked + at) == 0) return;
  const int lane = threadIdx.x % 32, first = (blockIdx.x * 8 + threadIdx.x / 32) * kWords;
  const uint32_t own =
      first + lane < p.words ? uint32_t(load_host(p.masks + int64_t(at) * p.words + first + lane)) : 0u;
  float* logits = p.logits + int64_t(p.first ? p.first[b] + place : b) * p.vocabulary;
  for (int word = 0; word < kWords; ++word) {
    const uint32_t bits = __shfl_sync(0xFFFFFFFFu, own, word);
    const int id = (first + word) * 32 + lane;
    if (id < p.vocabulary && !(bits >> lane & 1)) logits[id] = -INFINITY;
  }
}

// What may come, as the host knows it: a question a step, its answer, and the tokens that it rules out.
//
//   ask_masks    of every turn its last tokens and its drafts, for the host, which works while the layers run
//   await_masks  until the answer is there
//   mask_logits  logits[row, id] = -infinity where bit id of the place's mask is not set
//
// Shapes: AskMasks, AwaitMasks, MaskLogits; at most 1024 turns. A question has rows of 4 + 2 * block numbers: in row 0
// the number of turns; then a turn each: slot, length, drafts that are verified, the tokens at the `block` positions
// before the anchor (-1: none), the anchor, the drafts. Questions, masks and answers are in pinned host memory, which the
// host writes anew only after a step's question, so that they need no ring. Rows of masks are whole sixteens of bytes
// (`words` a multiple of 4, what is behind the vocabulary of no account). Without rules (`*ruled` 0) none of the three
// does anything. A host that does not answer in time is named in `late`, and the step goes on without masks. Grid:
// ask_masks one block of 1024, await_masks of 32; mask_logits (ceil(words / 256), batch * (block + 1)) of 64, a warp for
// 128 words. Padding: untouched. Bound: the host's answer; then the requests that read masks over its link, so a lane reads
// 16 bytes at once, and one of a warp whether there is a mask at all.
#include "contract.h"
#include "launch.cuh"

namespace dsuf {

constexpr int kBlock = DSUF_BLOCK, kPlaces = kBlock + 1, kQuestion = 4 + 2 * kBlock;
constexpr int kOwn = 4, kWords = 32 * kOwn;  // words of a mask: a lane's, and a warp's

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

// Sixteen bytes likewise.
__device__ __forceinline__ uint4 load_host4(const int32_t* from) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Rules out those of the four tokens from `id` on, a multiple of 4, whose bits in `allowed` are not set. Where rows are
// whole sixteens of bytes no four tokens end outside of one.
__device__ __forceinline__ void rule_out(float* logits, int id, uint32_t allowed, int vocabulary) {
  if (allowed == 0 && vocabulary % 4 == 0) {
    if (id < vocabulary) {
      *reinterpret_cast<float4*>(logits + id) = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    }
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (id + i < vocabulary && !(allowed >> i & 1)) logits[id + i] = -INFINITY;
  }
}

// Rules out tokens by a warp's words from `first` on, `own` a lane's four of them: eight lanes take a word at a time.
__device__ __forceinline__ void apply_words(float* logits, int first, uint4 own, int vocabulary) {
  const int lane = threadIdx.x % 32, group = lane / 8, part = lane % 8 * 4;
#pragma unroll 1  // unrolled it is 30 KB of instructions, which are fetched for one use
  for (int step = 0; step < 8; ++step) {
    uint32_t bits[4];
    const int lanes = step % 2 * 16 + group;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __shfl_sync(0xFFFFFFFFu, own.x, lanes + i * 4) >> part & 15;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rule_out(logits, (first + (lanes + i * 4) * kOwn + step / 2) * 32 + part, bits[i], vocabulary);
    }
    if (step % 2) own.x = own.y, own.y = own.z, own.z = own.w;
  }
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

extern "C" __global__ void __launch_bounds__(64) mask_logits(const dsuf::MaskLogits p) {
  using namespace dsuf;
  await_inputs();
  const int at = blockIdx.y, b = at / kPlaces, place = at % kPlaces, ruled = *p.ruled, live = *p.live;
  if ((ruled == 0) | (b >= min(live, p.batch))) return;  // both loads under way at once, as those below
  const int lane = threadIdx.x % 32, verified = p.verified ? p.verified[b] : 0, row = p.first ? p.first[b] + place : b;
  const int masked = lane == 0 ? load_host(p.masked + at) : 0;
  if (place > verified || __shfl_sync(0xFFFFFFFFu, masked, 0) == 0) return;
  const int first = (blockIdx.x * 2 + threadIdx.x / 32) * kWords, mine = first + lane * kOwn;
  uint4 own = {};
  if (mine < p.words) own = load_host4(p.masks + int64_t(at) * p.words + mine);
  apply_words(p.logits + int64_t(row) * p.vocabulary, first, own, p.vocabulary);
}

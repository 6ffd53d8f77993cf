// How kernels of one stream overlap: each may be launched before the one ahead of it has ended.
//
// A kernel first lets the next one start, then waits until all that the kernels before it wrote is there. What depends
// on none of them, weights that is, can be fetched in between. Launched plainly, a kernel finds nothing to wait for.
#pragma once
#include <stdint.h>

namespace dsuf {

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The first thing that every thread of every kernel does before it reads or writes memory.
__device__ __forceinline__ void await_inputs() {
  let_next_start();
  await_ahead();
}

// The same of a kernel that lets the next one start but when all before itself is done: the next one may then read, at
// once, what any kernel but this one wrote. It does so past the first-level cache.
__device__ __forceinline__ void await_inputs_first() {
  await_ahead();
  let_next_start();
}

// How many rows a pass has. embed_rows holds the kernels behind it until that is known and where rows go in the caches, so
// that those of the layers read it before they wait; norm_dim holds those that put the draft head's context in its places.
__device__ __forceinline__ int early_live(const int32_t* live) { return __ldcg(live); }

// Start moving `bytes` (whole sixteens, as the address) into the second-level cache.
__device__ __forceinline__ void fetch_ahead(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace dsuf

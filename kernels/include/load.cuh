// Loads, and work on what was loaded, that stay where they are written: the compiler would move all of it to the front
// or out of a loop, and spill what it has there.
#pragma once
#include <stdint.h>

namespace dsuf {

// `x`, from here on not known to be what it was before.
__device__ __forceinline__ uint32_t stay(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Sixteen bytes of memory that nothing writes and no other block of the multiprocessor reads soon: they leave the
// first-level cache to what is read again.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// Sixteen bytes that earlier kernels wrote.
__device__ __forceinline__ uint4 load_global(const void* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Sixteen bytes that earlier kernels wrote, past the first-level cache: there may be what was there before.
__device__ __forceinline__ uint4 load_fresh(const void* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Sixteen bytes of the block's shared memory.
__device__ __forceinline__ uint4 load_shared(const void* from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
  return x;
}

// Start copying kBytes (4, 8 or 16, as both addresses) of memory that nothing writes into shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  const uint32_t shared = uint32_t(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(kBytes) : "memory");
  }
}

// What a thread has begun to copy since the last call is one batch.
__device__ __forceinline__ void close_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All of this thread's batches but the last `left` are there, for this thread; a number up to kMost that the compiler
// knows.
template <int kMost = 16>
__device__ __forceinline__ void await_batches(int left) {
  if (left == kMost) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kMost) : "memory");
  } else if constexpr (kMost > 0) {
    await_batches<kMost - 1>(left);
  }
}

// Have the line at `from` brought into the first-level cache.
__device__ __forceinline__ void touch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

}  // namespace dsuf

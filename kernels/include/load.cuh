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

// Sixteen bytes of the block's shared memory.
__device__ __forceinline__ uint4 load_shared(const void* from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
  return x;
}

}  // namespace dsuf

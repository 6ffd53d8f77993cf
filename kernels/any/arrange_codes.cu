// FP4 weights of the routed experts as the expert kernels read them, from how they are released; in place, once.
//
// Shapes: ArrangeCodes; a word of eight codes becomes arrange_fp4 of it (experts.cuh), a thread takes four words. Grid:
// (ceil(count / 256), 1). Bound: bytes, read and written.
#include "contract.h"
#include "experts.cuh"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) arrange_codes(const dsuf::ArrangeCodes p) {
  using namespace dsuf;
  await_inputs();
  const int at = blockIdx.x * 256 + threadIdx.x;
  if (at >= p.count) return;
  uint4* codes = reinterpret_cast<uint4*>(p.codes) + at;
  const uint4 x = *codes;
  *codes = make_uint4(arrange_fp4(x.x), arrange_fp4(x.y), arrange_fp4(x.z), arrange_fp4(x.w));
}

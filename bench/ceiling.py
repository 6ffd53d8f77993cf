"""The read ceiling of a GPU: how many bytes a microsecond a kernel takes in that does nothing else.

Random contents, eight loads of a thread under way at a time, so that neither power nor latency is what is measured. A
run samples it again and again between its own measurements, from the same memory; floors are told at the median of the
samples, and the run is steady if nine in ten of them lie within `SPREAD` of it.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import cupy
except ImportError:  # the judgement of samples needs no GPU
    cupy = None

SOURCE_BYTES = 4 << 30
SPREAD = 0.03
WARM_UP, READS = 40, 12

_READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* from, size_t count, unsigned* out) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += 8 * step) {
    uint4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = i + j * step < count ? __ldcs(from + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (sum == 12345u) *out = sum;
}
extern "C" __global__ void scatter(unsigned* to, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    unsigned x = unsigned(i) * 2654435761u + unsigned(i >> 32);
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    to[i] = x ^ x >> 16;
  }
}
"""


class ReadCeiling:
    """Samples the ceiling on `stream`; holds 4 GiB until `close`."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.samples = stream, list[float]()
        module = cupy.RawModule(code=_READ)
        self._read = module.get_function("read_all")
        with stream:
            self._source, self._out = cupy.empty(SOURCE_BYTES, cupy.uint8), cupy.zeros(1, cupy.uint32)
            module.get_function("scatter")((132 * 8,), (256,), (self._source, np.uint64(SOURCE_BYTES // 4)))
            for _ in range(WARM_UP):
                self._queue()
        stream.synchronize()

    def sample(self) -> float:
        """Bytes a microsecond now: the median of some reads."""
        times = []
        for _ in range(READS):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self.stream)
            self._queue()
            stop.record(self.stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
        self.samples.append(SOURCE_BYTES / statistics.median(times))
        return self.samples[-1]

    @property
    def rate(self) -> float:
        """Bytes a microsecond, the median of the samples so far."""
        return statistics.median(self.samples)

    def close(self) -> None:
        """Free the memory that is read."""
        del self._source
        cupy.get_default_memory_pool().free_all_blocks()

    def _queue(self) -> None:
        with self.stream:
            self._read((132 * 4,), (512,), (self._source, np.uint64(SOURCE_BYTES // 16), self._out))


def describe(samples: Sequence[float]) -> str:
    """The ceiling of a run in words; pure."""
    middle, ordered = statistics.median(samples), sorted(samples)
    cut = len(ordered) // 20
    inner = ordered[cut : len(ordered) - cut]
    words = (
        f"reads {middle / 1e6:.2f} TB/s, {len(samples)} samples from {ordered[0] / 1e6:.2f} to {ordered[-1] / 1e6:.2f}"
    )
    steady = max(inner[-1] / middle - 1, 1 - inner[0] / middle) <= SPREAD
    return words if steady else f"{words}, NOT STEADY"

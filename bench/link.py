"""How long a word takes from one GPU to the other: two blocks, one on each, hand a counter to and fro."""

import math
import statistics
from typing import Any

import cupy
import numpy as np

from bench.report import Row

ROUNDS, WARM_UP = 2000, 100

SOURCE = r"""
extern "C" __global__ void hand_over(int* own, int* other, long long* at, int rounds, int second) {
  for (int round = 1; round <= rounds; ++round) {
    int seen;
    if (!second) asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(other), "r"(round) : "memory");
    const long long begun = clock64();
    do {
      asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(seen) : "l"(own) : "memory");
    } while (seen < round && clock64() - begun < 2000000000LL);
    if (second) asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(other), "r"(round) : "memory");
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    at[2 * (round - 1)] = clock64();
    at[2 * (round - 1) + 1] = (long long)now;
  }
}
"""
"""Each writes into the other's memory and looks into its own; every round is timed in cycles and nanoseconds."""


def measure_word() -> Row:
    """A row: half of the time of a round between the first two GPUs, which may write into each other's memory."""
    kernels, words, streams = [], [], []
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            kernels.append(cupy.RawKernel(SOURCE, "hand_over"))
            kernels[gpu].compile()
            words.append(cupy.zeros(1, cupy.int32))
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.Device(gpu).synchronize()
    stamps: list[Any] = []
    for gpu in range(2):
        with cupy.cuda.Device(gpu), streams[gpu]:
            stamps.append(cupy.zeros(2 * ROUNDS, cupy.int64))
            kernels[gpu](
                (1,), (1,), (words[gpu], words[1 - gpu].data.ptr, stamps[gpu], np.int32(ROUNDS), np.int32(gpu))
            )
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            streams[gpu].synchronize()
    with cupy.cuda.Device(0):
        cycles, nanoseconds = cupy.asnumpy(stamps[0]).reshape(ROUNDS, 2)[WARM_UP:].T
    rate = (nanoseconds[-1] - nanoseconds[0]) / (cycles[-1] - cycles[0])
    return describe_word(sorted(np.diff(cycles) * rate / 2e3))


def describe_word(times: list[float]) -> Row:
    """The figures of sorted times in microseconds; pure."""
    return {
        "by": "word to the other GPU", "gpus": 2, "rows": 0, "kilobytes": 0.004,
        "median_us": round(statistics.median(times), 2), "p90_us": round(times[math.ceil(0.9 * len(times)) - 1], 2),
        "min_us": round(times[0], 2), "max_us": round(times[-1], 2),
    }  # fmt: skip

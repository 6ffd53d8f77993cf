"""How long ranks wait for each other: kernels of theirs that note it at every meeting, and some that never wait."""

from typing import Any

import cupy
import numpy as np

from bench.skew import Waits
from dsuf.cuda.ranks import ANNOUNCING, SUMMING, RankedKernels, Values
from dsuf.cuda.streams import handle_on

MEETINGS = ("reduce_peers", "gather_peers", "gather_rows", *SUMMING.values())
ANNOUNCEMENTS = ("announce_partial", *ANNOUNCING.values())
MOST_MEETINGS, FAR_AHEAD, SPIN_CYCLES = 4096, 1 << 29, 20_000_000

SOURCE = r"""
extern "C" __global__ void watch(const int* arrived, const int* epoch, int ranks, long long* cycles) {
  const long long begun = clock64();
  for (int rank = 0; rank < ranks; ++rank) {
    int seen;
    do asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(seen) : "l"(arrived + rank) : "memory");
    while (int(unsigned(seen) - unsigned(*epoch)) < 0 && clock64() - begun < 4000000000LL);
  }
  *cycles = clock64() - begun;
}
extern "C" __global__ void spin(long long count, long long* nanoseconds) {
  unsigned long long first, last;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(first));
  for (const long long begun = clock64(); clock64() - begun < count;);
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(last));
  *nanoseconds = (long long)(last - first);
}
"""


class Aside(RankedKernels):
    """The launches of `ranked`, but for what a subclass does of its own; `gpus` says which GPU each rank has."""

    def __init__(self, ranked: RankedKernels, gpus: list[int]) -> None:
        vars(self).update(vars(ranked))
        self.gpus = gpus


class Watched(Aside):
    """Waits once more ahead of every meeting, and notes for how many cycles."""

    def __init__(self, ranked: RankedKernels, gpus: list[int]) -> None:
        super().__init__(ranked, gpus)
        self.module, self.all_meet = cupy.RawModule(code=SOURCE), [list[bool]() for _ in gpus]
        self.cycles, self.per_us = [], list[float]()
        for gpu in gpus:
            with cupy.cuda.Device(gpu):
                self.cycles.append(cupy.zeros(MOST_MEETINGS, cupy.int64))
                self.per_us.append(self._measure_rate())
                words = cupy.zeros(8, cupy.int32)  # nothing can be loaded while a graph is captured
                self.module.get_function("watch")((1,), (1,), (words, words, np.int32(1), self.cycles[-1]))
                cupy.cuda.Device().synchronize()
        self.settle()

    def launch_on(self, rank: int, entry: str, stream: int, values: Values) -> None:
        """As that of `RankedKernels`."""
        if entry in MEETINGS:
            with cupy.cuda.Device(self.gpus[rank]), cupy.cuda.ExternalStream(int(handle_on(stream, rank))):
                arrived, epoch = (cupy.asarray(values[name]) for name in ("arrived", "epoch"))
                place = self.cycles[rank][len(self.all_meet[rank]) :]
                self.module.get_function("watch")((1,), (1,), (arrived, epoch, np.int32(values["ranks"]), place))
            self.all_meet[rank].append(values["ranks"] == self.ranks)
        super().launch_on(rank, entry, stream, values)

    def waits(self) -> list[Waits]:
        """Of the last run, by rank."""
        rows = zip(self.cycles, self.all_meet, self.per_us, strict=True)
        return [Waits(cupy.asnumpy(cycles)[: len(meet)] / rate, np.array(meet)) for cycles, meet, rate in rows]

    def _measure_rate(self) -> float:
        """Cycles a microsecond of the current GPU."""
        took = cupy.zeros(1, cupy.int64)
        for _ in range(2):
            self.module.get_function("spin")((1,), (1,), (np.int64(SPIN_CYCLES), took))
        return SPIN_CYCLES / (float(took[0]) / 1e3)


class Apart(Aside):
    """Every sum by launches of its own, also where ranks announce and add up within what makes and reads a branch."""

    def __init__(self, ranked: RankedKernels, gpus: list[int]) -> None:
        super().__init__(ranked, gpus)
        self._within = set[int]()


class Unwaiting(Aside):
    """The same launches, and the same memory is read, but everybody counts as there at once: sums mean nothing."""

    def __init__(self, ranked: RankedKernels, gpus: list[int]) -> None:
        super().__init__(ranked, gpus)
        self.words, self.tables, self.ahead = [], [], []
        for gpu in gpus:
            with cupy.cuda.Device(gpu):
                self.words.append(cupy.zeros(64, cupy.int32))
                self.tables.append(cupy.full(8, self.words[-1].data.ptr, cupy.int64))
                self.ahead.append(cupy.full(8, FAR_AHEAD, cupy.int32))
                cupy.cuda.Device().synchronize()
        self.settle()

    def launch_on(self, rank: int, entry: str, stream: int, values: Values) -> None:
        """As that of `RankedKernels`."""
        own: dict[str, Any] = dict(values)
        if entry in ANNOUNCEMENTS:
            own["arrived"] = self.tables[rank]
        elif entry in MEETINGS:
            own["arrived"] = self.ahead[rank]
        super().launch_on(rank, entry, stream, own)

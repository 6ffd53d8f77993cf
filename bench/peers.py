"""Time of a sum over the GPUs of one host, as two launches: announce, then read everybody's part and add.

Every GPU runs a graph of many sums, one behind the other; parts take turns as in a step. Sums are checked against
NumPy's on every GPU. With one GPU the same kernels run with nobody to wait for: what is left is the launches. Beside
them: NCCL's sums in the same form where CuPy has it, copies of 16 bytes from one GPU to the other, and a word that is
handed to and fro.

    python bench/peers.py [--rows 1 6 8 96]
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.link import measure_word
from bench.nccl import NcclGroup, lacks_nccl
from bench.report import Row, publish
from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.machine import build_kernels

CONFIG = load_config(RELEASED / "config.json")
CHAIN, REPLAYS, WARM_UP = 80, 200, 20
PATIENCE_US = 1_000_000
MEMCPY_DEFAULT = 4


class Member:
    """One GPU of the group: its kernels, its stream, and its memory that the others read and write."""

    def __init__(self, index: int, ranks: int, rows: int, kernels: Kernels, device: Device) -> None:
        self.index, self.kernels, self.device, self.rows = index, kernels, device, rows
        self.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.parts = [cupy.zeros((rows, CONFIG.dim), cupy.uint16) for _ in range(2)]
        self.out, self.live = cupy.zeros((rows, CONFIG.dim), cupy.uint16), cupy.full(1, rows, cupy.int32)
        self.arrived, self.epoch = cupy.zeros(ranks, cupy.int32), cupy.zeros(1, cupy.int32)
        self.missing = cupy.zeros(1, cupy.int32)
        self.graph: Any = None

    def use(self) -> None:
        """Make this GPU the current one, for CuPy and for launches."""
        cupy.cuda.Device(self.index).use()
        self.device.use()

    def meet(self, all_members: Sequence["Member"]) -> None:
        """Learn the addresses of the others, and capture the chain of sums."""
        self.use()
        words = cupy.asarray([member.arrived.data.ptr for member in all_members], cupy.int64)
        tables = [cupy.asarray([member.parts[i].data.ptr for member in all_members], cupy.int64) for i in range(2)]
        self.held = words, tables
        sizes = {
            "rows": self.rows,
            "width": CONFIG.dim,
            "ranks": len(all_members),
            "patience_us": PATIENCE_US,
        }
        cupy.cuda.Device(self.index).synchronize()
        self.stream.begin_capture()
        for number in range(CHAIN):
            self.kernels.launch(
                "announce_partial", self.stream.ptr, arrived=words, epoch=self.epoch, rank=self.index,
                ranks=len(all_members),
            )  # fmt: skip
            self.kernels.launch(
                "reduce_peers", self.stream.ptr, partials=tables[number % 2], arrived=self.arrived, epoch=self.epoch,
                out=self.out, missing=self.missing, live=self.live, first=0, **sizes,
            )  # fmt: skip
        self.graph = self.stream.end_capture()

    def go(self) -> tuple[Any, Any]:
        """Start the chain; events before and behind it."""
        self.use()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(self.stream)
        self.graph.launch(self.stream)
        stop.record(self.stream)
        return start, stop


def measure(kernels: Sequence[tuple[Device, Kernels]], rows: int) -> Iterator[Row]:
    """A row for this many GPUs; raises if a sum is wrong."""
    members = [Member(i, len(kernels), rows, own, device) for i, (device, own) in enumerate(kernels)]
    parts = np.random.default_rng(rows).standard_normal((len(members), rows, CONFIG.dim)).astype(ml_dtypes.bfloat16)
    for member, part in zip(members, parts, strict=True):
        member.use()
        for place in member.parts:
            place.set(part.view(np.uint16))
    for member in members:
        member.meet(members)
    times = time_us(members)
    check(members, parts)
    yield row_of("announce and reduce", len(members), rows, times)
    if len(members) > 1 and not lacks_nccl():
        graphs = group_of(len(members)).capture(
            [member.parts[0] for member in members], [member.out for member in members],
            [member.stream for member in members], CHAIN,
        )  # fmt: skip
        for member, graph in zip(members, graphs, strict=True):
            member.graph = graph
        yield row_of("NCCL", len(members), rows, time_us(members))


def row_of(what: str, gpus: int, rows: int, times: Sequence[float]) -> Row:
    """The figures of times in microseconds."""
    return {
        "by": what, "gpus": gpus, "rows": rows, "kilobytes": round(rows * CONFIG.dim * 2 / 1e3, 1),
        "median_us": round(statistics.median(times), 2), "p90_us": round(sorted(times)[int(0.9 * len(times))], 2),
        "min_us": round(min(times), 2), "max_us": round(max(times), 2),
    }  # fmt: skip


@cache
def group_of(count: int) -> NcclGroup:
    """NCCL's communicators, made once."""
    return NcclGroup(count)


def measure_link() -> Row:
    """Copies of 16 bytes to the other GPU, one behind the other in a graph."""
    cupy.cuda.Device(1).use()
    there = cupy.zeros(4, cupy.int32)
    cupy.cuda.Device(0).use()
    here, stream = cupy.zeros(4, cupy.int32), cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    for _ in range(CHAIN):
        cupy.cuda.runtime.memcpyAsync(there.data.ptr, here.data.ptr, here.nbytes, MEMCPY_DEFAULT, stream.ptr)
    graph, times = stream.end_capture(), []
    for _ in range(WARM_UP + REPLAYS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / CHAIN)
    return {**row_of("copy of 16 bytes", 2, 0, times[WARM_UP:]), "kilobytes": 0.016}


def time_us(members: Sequence[Member]) -> list[float]:
    """Microseconds of a sum, of each replay of the chains that the members have.

    The shortest of the members' times: that of the last to be started, which waits for no start of another.
    """
    times = []
    for number in range(WARM_UP + REPLAYS):
        marks = [member.go() for member in members]
        for member, (_, stop) in zip(members, marks, strict=True):
            member.use()
            stop.synchronize()
        if number >= WARM_UP:
            times.append(min(cupy.cuda.get_elapsed_time(*pair) for pair in marks) * 1e3 / CHAIN)
    return times


def check(members: Sequence[Member], parts: Any) -> None:
    """Every GPU has NumPy's bits, and has missed nobody."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    for member in members:
        member.use()
        if int(member.missing[0]):
            raise SystemExit(f"GPU {member.index} did not hear of GPU {int(member.missing[0]) - 1}")
        if not np.array_equal(cupy.asnumpy(member.out), total.astype(ml_dtypes.bfloat16).view(np.uint16)):
            raise SystemExit(f"GPU {member.index} has another sum")


def open_peers(count: int) -> list[tuple[Device, Kernels]]:
    """All GPUs with kernels, each allowed to read the others."""
    opened = []
    for index in range(count):
        cupy.cuda.Device(index).use()
        device = Device(index)
        opened.append((device, build_kernels(device, CONFIG)))
        for other in range(count):
            if other != index:
                cupy.cuda.runtime.deviceEnablePeerAccess(other)
    return opened


def main() -> None:
    """Measure, print, write `results/peers.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 8, 96])
    args = parser.parse_args()
    count = cupy.cuda.runtime.getDeviceCount()
    peers = open_peers(count)
    rows = [row for n in args.rows for row in measure(peers[:1], n)]
    if count > 1:
        print(lacks_nccl())
        rows += [row for n in args.rows for row in measure(peers, n)]
        rows += [measure_link(), measure_word()]
    publish("peers", rows, f"{count} x {peers[0][0].name}")


if __name__ == "__main__":
    main()

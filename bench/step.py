"""Time of a whole decode step of one rank of eight, beside the time that its bytes take at the read ceiling.

The rank (`bench/rank.py`) runs the engine's own decode step, draft head included, captured as one graph. In it:
everything on this GPU. Not in it, since there is one GPU: what the other ranks do, how long their data takes to come,
the gathering of their best entries and logits. Times are from device events around each replay; turns are put back to
their length before each.

    python bench/step.py [--rows 1 6 8 16 96] [--context 1024 65536 1048576] [--replays 200]
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cupy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.ceiling import ReadCeiling, describe
from bench.launchlist import capture, profile, time_us
from bench.rank import RANKS, Bytes, Rank, gpu_state, rank_of_eight, scored_tokens
from bench.report import Row, publish
from dsuf.cuda.arena import Array
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.machine import build_kernels
from dsuf.cuda.ranks import ANNOUNCING, MOST_ROWS_WITHIN, SUMMED, SUMMING
from dsuf.cuda.step import StepShape

SHAPES = {1: (1, 0), 6: (1, 5), 8: (2, 3), 16: (4, 3), 96: (16, 5)}
"""Turns and drafts of each number of rows."""

MOST_ROWS, MOST_TURNS, LAST_SAMPLES = 96, 16, 8


class LocalPeers:
    """Kernels of a rank that adds up what eight ranks have, the others' parts being buffers on this GPU.

    They have always arrived. Branches of few rows are announced by what makes them and added up by what reads them, as
    ranks do it; else a sum follows the launch of which a rank has only a part, and what comes next reads it.
    """

    def __init__(self, kernels: Kernels, dim: int, streams: int) -> None:
        self.kernels, self.dim, self.launched = kernels, dim, 0
        widest = MOST_ROWS * (streams + 1) * dim
        self.others = cupy.zeros((RANKS - 1, widest), cupy.uint16)
        self.result, self.epoch = cupy.zeros(widest, cupy.uint16), cupy.zeros(1, cupy.int32)
        self.counter = cupy.zeros(1, cupy.int32)
        self.missing, self.arrived = cupy.zeros(1, cupy.int32), cupy.full((RANKS, RANKS), 1 << 30, cupy.int32)
        self.arrived[0, 0] = 0
        self.words = cupy.asarray([row.data.ptr for row in self.arrived], cupy.int64)
        self.tables: dict[int, Any] = {}

    def show(self, parts: Iterable[Array]) -> None:
        """Make the tables of addresses of what is summed; nothing can be uploaded while a graph is captured."""
        others = [row.data.ptr for row in self.others]
        for part in parts:
            self.tables[part.pointer] = cupy.asarray([part.pointer, *others], cupy.int64)

    def launch(self, entry: str, stream: int = 0, **values: Any) -> None:
        """As `Kernels.launch`."""
        self.launched += 1
        few = values.get("rows", 0) <= MOST_ROWS_WITHIN
        if few and entry in ANNOUNCING:
            entry, values = ANNOUNCING[entry], {**values, **self._announced(), "counter": self.counter}
        elif few and entry in SUMMING:
            partials = self.tables[values.pop("branch").pointer]
            entry, values = SUMMING[entry], {**values, **self._met(), "partials": partials}
        elif entry in SUMMING:
            values["branch"] = self.result
        elif entry == "gate_engram":
            values["projected"] = self.result
        self.kernels.launch(entry, stream, **values)
        if entry in SUMMED:
            self._sum(values["out"], values.get("n", self.dim), values["rows"], values["live"], stream)

    def _announced(self) -> dict[str, Any]:
        return {"arrived": self.words, "epoch": self.epoch, "rank": 0, "ranks": RANKS}

    def _met(self) -> dict[str, Any]:
        arrays = {"arrived": self.arrived[0], "epoch": self.epoch, "missing": self.missing}
        return {**arrays, "ranks": RANKS, "patience_us": 1_000_000}

    def _sum(self, part: Array, width: int, rows: int, live: Array, stream: int) -> None:
        self.kernels.launch("announce_partial", stream, **self._announced())
        self.kernels.launch(
            "reduce_peers", stream, partials=self.tables[part.pointer], out=self.result, live=live, first=0, rows=rows,
            width=width, **self._met(),
        )  # fmt: skip
        self.launched += 2


def measure(rank: Rank, rows: int, context_tokens: int, ceiling: ReadCeiling, replays: int) -> Iterator[Row]:
    """The rows of one shape, without and with the sums over ranks; their floors are still to come."""
    stream = ceiling.stream
    batch, drafts = SHAPES[rows]
    shape = StepShape(batch=batch, drafts=drafts, tokens=scored_tokens(context_tokens))
    with stream:
        reset = rank.want(shape)
        reset()
        distinct = rank.count_experts(shape, stream)
        launches = rank.record(lambda machine: machine.decoder.queue(shape, 0))
        counted = Bytes(rank, shape, distinct)
        total = sum(counted.of(launch) for launch in launches)
        peers = LocalPeers(rank.kernels, rank.config.dim, rank.config.hc_mult)
        peers.show(launch.values["out"] for launch in launches if launch.entry in SUMMED)
        for reduction, kernels in (("none", rank.kernels), ("local", peers)):
            graph = capture(partial(rank.branched(kernels).decoder.queue, shape), stream)
            reads = ceiling.sample()
            times = time_us(graph, stream, replays, reset)
            median = statistics.median(times)
            print(f"{rows} rows, {context_tokens} tokens, {reduction}: {median:.0f} us", flush=True)
            yield {
                "tp": RANKS, "rows": rows, "turns": batch, "drafts": drafts, "context": context_tokens,
                "reduction": reduction, "experts": round(mean_experts(distinct, "layers."), 1),
                "draft_experts": round(mean_experts(distinct, "mtp."), 1), "gigabytes": round(total / 1e9, 3),
                "median_ms": round(median / 1e3, 3),
                "p90_ms": round(times[int(0.9 * (len(times) - 1))] / 1e3, 3), "min_ms": round(times[0] / 1e3, 3),
                "tb_per_s": round(total / median / 1e6, 2), "reads_tb_per_s": round(reads / 1e6, 2),
                "launches": peers.launched or len(launches),
                "finite": bool(cupy.isfinite(cupy.asarray(rank.arena["decode.logits"])[:rows]).all()),
            }  # fmt: skip


def mean_experts(distinct: Mapping[str, int], prefix: str) -> float:
    """Experts a layer reads, over those whose name begins with `prefix`."""
    counts = [count for name, count in distinct.items() if name.startswith(prefix)]
    return statistics.mean(counts) if counts else 0.0


def add_floor(row: Row, rate: float) -> Row:
    """`row` with the time that its bytes take at `rate` bytes a microsecond; pure."""
    floor = float(str(row["gigabytes"])) * 1e6 / rate
    return {**row, "floor_ms": round(floor, 3), "ratio": round(float(str(row["median_ms"])) / floor, 2)}


def profile_rows(rank: Rank, rows: int, context_tokens: int, stream: Any, rate: float) -> Iterator[Row]:
    """A row an entry: its launches in a step, how long they take by themselves, and what their bytes take."""
    batch, drafts = SHAPES[rows]
    shape = StepShape(batch=batch, drafts=drafts, tokens=scored_tokens(context_tokens))
    with stream:
        reset = rank.want(shape)
        reset()
        distinct = rank.count_experts(shape, stream)
        launches = rank.record(lambda machine: machine.decoder.queue(shape, 0))
        counted = Bytes(rank, shape, distinct)
        found = profile(rank.kernels, launches, stream, reset)
        total = sum(time for _, time in found.values())
        for entry, (count, time) in found.items():
            floor = sum(counted.of(launch) for launch in launches if launch.entry == entry) / rate
            yield {
                "rows": rows, "context": context_tokens, "kernel": entry, "launches": count, "us": round(time, 1),
                "share": round(time / total, 3), "us_a_launch": round(time / count, 2), "floor_us": round(floor, 1),
            }  # fmt: skip


def main() -> None:
    """Measure, print, write `results/step.json` and `results/step-profile.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 65_536, 1_048_576])
    parser.add_argument("--replays", type=int, default=200)
    args = parser.parse_args()
    device, config = Device(), rank_of_eight()
    kernels = build_kernels(device, config)
    stream = cupy.cuda.Stream(non_blocking=True)
    free, total = cupy.cuda.runtime.memGetInfo()
    print(f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free with kernels loaded", flush=True)
    rank, ceiling = Rank(device, kernels, config, max(args.context), MOST_TURNS), ReadCeiling(stream)
    rank.fill()
    cupy.cuda.Device().synchronize()
    rows = [
        row for n in args.rows for tokens in args.context for row in measure(rank, n, tokens, ceiling, args.replays)
    ]
    for _ in range(LAST_SAMPLES):
        ceiling.sample()
    shares = [row for n in {6, 96} & set(args.rows) for row in profile_rows(rank, n, 65_536, stream, ceiling.rate)]
    rank.arena.close()
    rows, label = [add_floor(row, ceiling.rate) for row in rows], f"{device.name} ({gpu_state()}), "
    label += describe(ceiling.samples)
    publish("step", rows, label)
    if shares:
        publish("step-profile", shares, label)


if __name__ == "__main__":
    main()

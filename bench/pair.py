"""Two of eight ranks at true shapes, a GPU each: a decode step and a prefill pass, against the same rank by itself.

A step is timed with each rank alone (no sums), with both and the sums between them, with both and all sums by launches
of their own, with both but everybody counting as there at once (what is left is the launches and the link), and with a
kernel ahead of every meeting that notes how long its rank waits there. A prefill pass is timed alone, with both, and
with its rows divided among both. Runs are queued one behind the other; of the two GPUs' times the shorter counts, that
of the one that began last. With one GPU both ranks share it: that says whether everything runs, not how fast it is.

    python bench/pair.py [--rows 6] [--context 65536] [--prefill 256 1024] [--replays 200]
"""

import argparse
import contextlib
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.prefill import KINDS
from bench.rank import RANKS, gpu_state, scored_tokens
from bench.report import Row, publish
from bench.skew import Waits, describe_waits
from bench.step import SHAPES
from bench.twins import COUNT, Run, Twins
from bench.waits import Apart, Unwaiting, Watched
from dsuf.cuda.devices import count_devices, open_devices
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import Machine
from dsuf.cuda.prefill import PassKind
from dsuf.cuda.ranks import RankedKernels
from dsuf.cuda.step import StepShape

PREFILL_REPLAYS, WATCHED = 20, 60

Part = Callable[[], Iterator[Row]]


class Step:
    """A step of so many rows, and the ways to time it."""

    def __init__(self, twins: Twins, rows: int, context_tokens: int, replays: int) -> None:
        self.twins, self.replays = twins, replays
        batch, drafts = SHAPES[rows]
        self.shape = StepShape(batch=batch, drafts=drafts, tokens=scored_tokens(context_tokens))
        self.facts = {"what": "step", "rows": rows, "context": context_tokens}
        self.reset = twins.resets(self.shape)

    def alone(self) -> Iterator[Row]:
        """Each rank by itself."""
        yield self._row("alone", self._time(self.twins.capture_alone(self._queue)))

    def together(self) -> Iterator[Row]:
        """Both, and whether they agree."""
        found = self._time(self._capture())
        yield self._row("together", {**found, "alike": agree(self.twins)})

    def apart(self) -> Iterator[Row]:
        """Both, sums by launches of their own, and whether they agree."""
        found = self._time(self._capture(Apart(self.twins.ranked, self.twins.gpus)))
        yield self._row("together, sums launched", {**found, "alike": agree(self.twins)})

    def unwaiting(self) -> Iterator[Row]:
        """Both, everybody counting as there at once."""
        run = self._capture(Unwaiting(self.twins.ranked, self.twins.gpus))
        yield self._row("together, nobody waits", self._time(run))

    def watched(self) -> Iterator[Row]:
        """Both, with a kernel that notes waits."""
        watched = Watched(self.twins.ranked, self.twins.gpus)
        found = watch(self.twins, watched, self._capture(watched), self.reset, self.replays)
        yield self._row("together, waits noted", found)

    def _queue(self, machine: Machine, handle: int) -> None:
        machine.decoder.queue(self.shape, handle)

    def _capture(self, kernels: RankedKernels | None = None) -> Run:
        return self.twins.capture(self._queue, self.twins.together(kernels))

    def _time(self, run: Run) -> dict[str, object]:
        return describe(self.twins.time_ms(run, self.reset, self.replays))

    def _row(self, by: str, found: Mapping[str, object]) -> Row:
        return {**self.facts, "by": by, **found}


def watch(twins: Twins, watched: Watched, run: Any, reset: Any, replays: int) -> dict[str, object]:
    """Times of runs in which waits are noted, and what those come to."""
    times, waits = list[list[float]](), list[list[Waits]]()
    for _ in range(min(replays, WATCHED)):
        times.append([column[-1] for column in twins.time_ms(run, reset, 1, warm_up=3)])
        waits.append(watched.waits())
    return {**describe(list(map(list, zip(*times, strict=True)))), **describe_waits(waits, list(map(min, times)))}


def measure_prefill(twins: Twins, kind: PassKind, rows: int, context_tokens: int) -> Iterator[Row]:
    """The rows of a pass of `kind`."""
    tokens = max(rows, scored_tokens(context_tokens))
    ids = np.random.default_rng(5).integers(5, twins.config.vocab_size, rows)
    together, divided = twins.together(), twins.together(splits=True)
    divided.prefiller.put_rows(0, tokens - rows, ids, twins.stream.handle)

    def queue(machine: Machine, handle: int) -> None:
        machine.prefiller.queue(kind, rows, tokens, handle)

    captures: dict[str, Callable[[], Run]] = {
        "alone": lambda: twins.capture_alone(queue),
        "together": lambda: twins.capture(queue, together),
        "together, rows divided": lambda: twins.capture(queue, divided),
    }
    for by, capture in captures.items():
        found = describe(twins.time_ms(capture(), lambda: None, PREFILL_REPLAYS))
        each = round(float(str(found["median_ms"])) * 1e3 / rows, 2)
        yield {"what": kind, "rows": rows, "context": context_tokens, "by": by, **found, "us_a_token": each}


def describe(times: Sequence[Sequence[float]]) -> dict[str, object]:
    """Figures of milliseconds by GPU; pure."""
    each = sorted(min(run) for run in zip(*times, strict=True))
    return {
        "median_ms": round(statistics.median(each), 3), "p90_ms": round(each[math.ceil(0.9 * len(each)) - 1], 3),
        "min_ms": round(each[0], 3), "gpu_ms": [round(statistics.median(column), 3) for column in times],
    }  # fmt: skip


def agree(twins: Twins) -> bool:
    """Whether both ranks have the same finite logits, of all the vocabulary that is theirs, and chose the same."""
    facts = twins.each(lambda rank, twin: [
        cupy.asnumpy(cupy.asarray(twin.arena[name])) for name in ("decode.logits", "turns.length", "turns.anchor")
    ])  # fmt: skip
    same = all(np.array_equal(one, other) for one, other in zip(*facts, strict=True))
    return same and bool(np.isfinite(facts[0][0]).all())


def list_parts(twins: Twins, args: argparse.Namespace) -> Iterator[Part]:
    """All that is to be measured, prefill first: its figures have no other source."""
    for rows in args.prefill:
        for kind in KINDS:
            yield partial(measure_prefill, twins, kind, rows, args.context)
    for rows in args.rows:
        step = Step(twins, rows, args.context, args.replays)
        yield from (step.alone, step.together, step.apart, step.watched, step.unwaiting)


def measure(parts: Iterable[Part], keep: Callable[[Row], None]) -> int:
    """Give `keep` every row as it comes; how many parts broke off, which keeps none of the others back."""
    broken = 0
    for part in parts:
        try:
            for row in part():
                keep(row)
        except Exception:
            traceback.print_exc()
            broken += 1
    return broken


def main() -> None:
    """Measure, print, write `results/pair.json` after every row; exit code 1 if something broke off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", choices=[1, 6], default=[6])
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--prefill", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--replays", type=int, default=200)
    args = parser.parse_args()
    devices = open_devices(COUNT) if count_devices() >= COUNT else [Device()] * COUNT
    twins = Twins(devices, args.context, max([128, *args.prefill]))
    twins.fill()
    found: list[Row] = []

    def keep(row: Row) -> None:
        print(row, flush=True)
        found.append({"tp": RANKS, "gpus": len(set(twins.gpus)), **row})
        empty = dict.fromkeys(name for each in found for name in each)
        label = f"{len(set(twins.gpus))} x {devices[0].name} ({gpu_state()})"
        with contextlib.redirect_stdout(None):
            publish("pair", [{**empty, **each} for each in found], label)

    broken = measure(list_parts(twins, args), keep)
    twins.close()
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()

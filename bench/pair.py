"""Two of eight ranks at true shapes, a GPU each: a decode step and a prefill pass, against the same rank by itself.

A step is timed with each rank alone (no sums), with both and the sums between them, with both but everybody counting as
there at once (what is left is the launches and the link), and with a kernel ahead of every meeting that notes how long
its rank waits there. A prefill pass is timed alone, with both, and with its rows divided among both. Runs are queued
one behind the other; of the two GPUs' times the shorter counts, that of the one that began last. With one GPU both
ranks share it: that says whether everything runs, not how fast it is.

    python bench/pair.py [--rows 6] [--context 65536] [--prefill 256 1024] [--replays 200]
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
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
from bench.twins import COUNT, Twins
from bench.waits import Unwaiting, Watched
from dsuf.cuda.devices import count_devices, open_devices
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import Machine
from dsuf.cuda.step import StepShape

PREFILL_REPLAYS, WATCHED = 20, 60


def measure_step(twins: Twins, rows: int, context_tokens: int, replays: int) -> Iterator[Row]:
    """The rows of a step."""
    batch, drafts = SHAPES[rows]
    shape = StepShape(batch=batch, drafts=drafts, tokens=scored_tokens(context_tokens))
    reset = twins.resets(shape)
    facts = {"what": "step", "rows": rows, "context": context_tokens}

    def queue(machine: Machine, handle: int) -> None:
        machine.decoder.queue(shape, handle)

    yield {**facts, "by": "alone", **describe(twins.time_ms(twins.capture_alone(queue), reset, replays))}
    yield {**facts, "by": "together", **describe(twins.time_ms(twins.capture(queue, twins.together()), reset, replays)),
           "alike": agree(twins)}  # fmt: skip
    unwaiting = Unwaiting(twins.ranked, twins.gpus)
    run = twins.capture(queue, twins.together(unwaiting))
    yield {**facts, "by": "together, nobody waits", **describe(twins.time_ms(run, reset, replays))}
    watched = Watched(twins.ranked, twins.gpus)
    run = twins.capture(queue, twins.together(watched))
    yield {**facts, "by": "together, waits noted", **watch(twins, watched, run, reset, replays)}


def watch(twins: Twins, watched: Watched, run: Any, reset: Any, replays: int) -> dict[str, object]:
    """Times of runs in which waits are noted, and what those come to."""
    times, waits = list[list[float]](), list[list[Waits]]()
    for _ in range(min(replays, WATCHED)):
        times.append([column[-1] for column in twins.time_ms(run, reset, 1, warm_up=3)])
        waits.append(watched.waits())
    return {**describe(list(map(list, zip(*times, strict=True)))), **describe_waits(waits, list(map(min, times)))}


def measure_prefill(twins: Twins, rows: int, context_tokens: int) -> Iterator[Row]:
    """The rows of a pass of each kind."""
    tokens = max(rows, scored_tokens(context_tokens))
    ids = np.random.default_rng(5).integers(5, twins.config.vocab_size, rows)
    together, divided = twins.together(), twins.together(splits=True)
    divided.prefiller.put_rows(0, tokens - rows, ids, twins.stream.handle)
    for kind in KINDS:

        def queue(machine: Machine, handle: int, kind: Any = kind) -> None:
            machine.prefiller.queue(kind, rows, tokens, handle)

        runs = {"alone": twins.capture_alone(queue), "together": twins.capture(queue, together),
                "together, rows divided": twins.capture(queue, divided)}  # fmt: skip
        for by, run in runs.items():
            times = twins.time_ms(run, lambda: None, PREFILL_REPLAYS)
            found = describe(times)
            found |= {"us_a_token": round(float(str(found["median_ms"])) * 1e3 / rows, 2)}
            yield {"what": kind, "rows": rows, "context": context_tokens, "by": by, **found}


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


def main() -> None:
    """Measure, print, write `results/pair.json`."""
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
    steps = partial(measure_step, twins, context_tokens=args.context, replays=args.replays)
    for measured in (*map(steps, args.rows), *(measure_prefill(twins, rows, args.context) for rows in args.prefill)):
        for row in measured:
            print(row, flush=True)
            found.append({"tp": RANKS, "gpus": len(set(twins.gpus)), **row})
    twins.close()
    empty = dict.fromkeys(name for row in found for name in row)
    publish("pair", [{**empty, **row} for row in found], f"{len(set(twins.gpus))} x {devices[0].name} ({gpu_state()})")


if __name__ == "__main__":
    main()

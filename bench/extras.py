"""What constraints and log-probabilities add to a decode step of one rank of eight, as `bench/step.py` times it.

Questions are asked and masks applied to every row, but answered in advance: how long the host takes for an answer is
`bench/masks.py`'s; it counts only where it is longer than the layers. Without sums over ranks.

    python bench/extras.py [--rows 6 96] [--context 65536] [--replays 200]
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cupy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.launchlist import capture, time_us
from bench.rank import RANKS, Rank, gpu_state, rank_of_eight, scored_tokens
from bench.report import Row, publish
from bench.step import MOST_TURNS, SHAPES
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import build_kernels
from dsuf.cuda.step import StepShape

CASES = {
    "without": (False, 0, -1), "nobody asks": (True, 0, -1), "log-probabilities": (True, 0, 0),
    "with the 20 likeliest": (True, 0, 20), "masks": (True, 1, -1), "masks, log-probabilities": (True, 1, 0),
}  # fmt: skip
"""Whether the step has extras at all, whether it has rules, and how many of the likeliest tokens are told of."""


def measure(rank: Rank, rows: int, context_tokens: int, stream: Any, replays: int) -> Iterator[Row]:
    """A row a case."""
    batch, drafts = SHAPES[rows]
    arrays = {name: cupy.asarray(rank.arena[name]) for name in ("decode.ruled", "turns.logprobs")}
    rank.arena.host("decode.answered")[0] = 1 << 62
    rank.arena.host("decode.masks")[...], rank.arena.host("decode.masked")[...] = -1, 1
    before = 0.0
    for case, (extras, ruled, logprobs) in CASES.items():
        with stream:
            shape = StepShape(batch, drafts, scored_tokens(context_tokens), extras)
            reset = rank.want(shape)
            arrays["decode.ruled"].fill(ruled)
            arrays["turns.logprobs"].fill(logprobs)
            reset()
            graph = capture(partial(rank.branched(rank.kernels).decoder.queue, shape), stream)
            median_us = statistics.median(time_us(graph, stream, replays, reset))
        before = before or median_us
        print(f"{rows} rows, {case}: {median_us:.0f} us", flush=True)
        yield {
            "tp": RANKS, "rows": rows, "turns": batch, "drafts": drafts, "context": context_tokens, "case": case,
            "median_us": round(median_us, 1), "more_us": round(median_us - before, 1),
        }  # fmt: skip


def main() -> None:
    """Measure, print, write `results/extras.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", choices=sorted(SHAPES), default=[6, 96])
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--replays", type=int, default=200)
    args = parser.parse_args()
    device, config = Device(), rank_of_eight()
    kernels, stream = build_kernels(device, config), cupy.cuda.Stream(non_blocking=True)
    rank = Rank(device, kernels, config, args.context, MOST_TURNS)
    rank.fill()
    cupy.cuda.Device().synchronize()
    rows = [row for n in args.rows for row in measure(rank, n, args.context, stream, args.replays)]
    rank.arena.close()
    publish("extras", rows, f"{device.name} ({gpu_state()})")


if __name__ == "__main__":
    main()

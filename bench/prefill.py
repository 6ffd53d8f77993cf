"""Time of a prefill pass of one rank of eight, per prompt token, and the rate of its matrix products.

The rank (`bench/rank.py`) runs the engine's own passes over the last rows of a prompt: `encode`, what replayed prefill
does with most of it, and `forward`, all layers. Counted are the operations of matrices alone, attention and index
scores come on top. In the time is everything on this GPU, not in it what other ranks do.

    python bench/prefill.py [--rows 256 1024] [--context 0 65536 1048576] [--replays 10]
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.launchlist import Launch, capture, profile, time_us
from bench.rank import RANKS, Rank, gpu_state, rank_of_eight, scored_tokens
from bench.report import Row, publish
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import build_kernels

KINDS = ("encode", "forward")
PROFILED_CONTEXT = 65_536


def put_rows(rank: Rank, rows: int, context_tokens: int, stream: Any) -> int:
    """Put `rows` rows behind `context_tokens` positions in place; the positions up to their end."""
    tokens = max(rows, scored_tokens(context_tokens) if context_tokens else 0)
    ids = np.random.default_rng(5).integers(5, rank.config.vocab_size, rows)
    rank.machine(rank.kernels).prefiller.put_rows(0, tokens - rows, ids, stream.ptr)
    return tokens


def record(rank: Rank, kind: Any, rows: int, tokens: int) -> list[Launch]:
    """The launches of a pass."""
    return rank.record(lambda machine: machine.prefiller.queue(kind, rows, tokens, 0))


def operations(launches: Sequence[Launch], rank: Rank) -> int:
    """Multiplications and additions of the matrix products with weights."""
    c, total = rank.config, 0
    expert = 2 * c.dim * c.moe_inter_dim
    rows = next(int(launch.values["rows"]) for launch in launches if "rows" in launch.values)
    for launch in launches:
        v = launch.values
        if launch.entry in ("experts_up", "experts_down"):
            total += rows * c.n_activated_experts * expert * (2 if launch.entry == "experts_up" else 1)
            total += 2 * rows * v["shared"].bytes
        elif launch.entry.startswith("project_"):
            weight = v.get("weight", v.get("fn"))
            total += 2 * rows * weight.bytes // {"u8": 1, "bf16": 2, "f32": 4}[weight.kind]
    return total


def measure(rank: Rank, rows: int, context_tokens: int, stream: Any, replays: int) -> Iterator[Row]:
    """A row a kind of pass."""
    for kind in KINDS:
        with stream:
            tokens = put_rows(rank, rows, context_tokens, stream)
            graph = capture(partial(rank.branched(rank.kernels).prefiller.queue, kind, rows, tokens), stream)
            times = time_us(graph, stream, replays)
            launches = record(rank, kind, rows, tokens)
        median, count = statistics.median(times), operations(launches, rank)
        print(f"{kind}, {rows} rows, {context_tokens} tokens: {median / 1e3:.2f} ms", flush=True)
        yield {
            "tp": RANKS, "pass": kind, "rows": rows, "context": context_tokens, "launches": len(launches),
            "median_ms": round(median / 1e3, 3), "p90_ms": round(times[int(0.9 * (len(times) - 1))] / 1e3, 3),
            "us_a_token": round(median / rows, 2), "gflop_a_token": round(count / rows / 1e9, 3),
            "tflop_per_s": round(count / median / 1e6, 1),
        }  # fmt: skip


def profile_rows(rank: Rank, rows: int, stream: Any) -> Iterator[Row]:
    """A row an entry of an encoder pass: how long its launches take by themselves."""
    with stream:
        tokens = put_rows(rank, rows, PROFILED_CONTEXT, stream)
        launches = record(rank, "encode", rows, tokens)
        found = profile(rank.kernels, launches, stream, lambda: None)
    total = sum(time for _, time in found.values())
    for entry, (count, time) in found.items():
        yield {
            "rows": rows, "context": PROFILED_CONTEXT, "kernel": entry, "launches": count, "us": round(time, 1),
            "share": round(time / total, 3), "us_a_launch": round(time / count, 2),
        }  # fmt: skip


def main() -> None:
    """Measure, print, write `results/prefill.json` and `results/prefill-profile.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[0, 65_536, 1_048_576])
    parser.add_argument("--replays", type=int, default=10)
    args = parser.parse_args()
    device, config = Device(), rank_of_eight()
    kernels, stream = build_kernels(device, config), cupy.cuda.Stream(non_blocking=True)
    rank = Rank(device, kernels, config, max([PROFILED_CONTEXT, *args.context]), 1, max(args.rows))
    rank.fill()
    cupy.cuda.Device().synchronize()
    rows = [row for n in args.rows for tokens in args.context for row in measure(rank, n, tokens, stream, args.replays)]
    shares = list(profile_rows(rank, max(args.rows), stream))
    rank.arena.close()
    label = f"{device.name} ({gpu_state()})"
    publish("prefill", rows, label)
    publish("prefill-profile", shares, label)


if __name__ == "__main__":
    main()

"""Time of every kernel at the released sizes, beside the time that its bytes take at the copy bandwidth of this GPU.

Each kernel runs as in a verify step of one stream: six rows, here with all heads and experts on one GPU. Launches are
captured in a graph and go round several sets of weights, so that these come from memory, not from the cache. A launch
alone costs 1 to 2 µs, which no small kernel can go below; its floor counts bytes only.

    python bench/kernels.py [--rows 6] [--context-tokens 65536] [--only TEXT]
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.kernel_cases import SIZES, Case, cache_cases, expert_cases, linear_cases, stream_cases
from bench.report import publish
from bench.token_cases import place_cases, token_cases
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.table import SOURCES
from dsuf.cuda.toolchain import find_toolchain

COLD_BYTES = 256 << 20  # several times the second-level cache
LAUNCHES, REPLAYS = 40, 25
FLOOR_THAT_COUNTS_US = 0.5  # below it the launch alone decides, and a ratio would say nothing


def time_graph(record: Callable[[int], None], stream: Any) -> list[float]:
    """Microseconds a launch, one figure a replay, of what `record` queues on a stream."""
    stream.begin_capture()
    record(stream.ptr)
    graph = stream.end_capture()
    times = []
    for _ in range(REPLAYS + 3):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / LAUNCHES)
    return sorted(times[3:])


def copy_bytes_per_us(stream: Any) -> float:
    """Bytes read and written a microsecond by a copy of 2 GiB within the device."""
    source, target = cupy.zeros(2 << 30, cupy.uint8), cupy.zeros(2 << 30, cupy.uint8)
    with stream:
        start, stop, times = cupy.cuda.Event(), cupy.cuda.Event(), []
        for _ in range(10):
            start.record(stream)
            cupy.copyto(target, source)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return 2 * source.nbytes / statistics.median(times)


def main() -> None:
    """Measure, print, write `results/kernels.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--context-tokens", type=int, default=65_536)
    parser.add_argument("--only", default="", help="kernels whose name holds this text; nothing is written")
    args = parser.parse_args()
    device = Device()
    kernels = Kernels(device, find_toolchain().build_all(SOURCES, device.sm, SIZES.macros()), SIZES)
    stream = cupy.cuda.Stream(non_blocking=True)
    rate = copy_bytes_per_us(stream)
    rows = []
    for cases in (
        stream_cases(args.rows),
        linear_cases(args.rows),
        expert_cases(args.rows, kernels),
        cache_cases(args.rows, args.context_tokens),
        place_cases(args.rows, args.context_tokens),
        token_cases(args.rows),
    ):
        for case in cases:
            if args.only in case.entry:
                rows.append(measure(case, args.rows, kernels, stream, rate))
                cupy.get_default_memory_pool().free_all_blocks()
    label = f"{device.name}, copies {rate / 1e6:.2f} TB/s"
    if args.only:
        print(label, *rows, sep="\n")
    else:
        publish("kernels", rows, label)


def measure(case: Case, rows: int, kernels: Kernels, stream: Any, rate: float) -> dict[str, object]:
    """The row of one case."""
    count = max(1, min(LAUNCHES, COLD_BYTES // max(1, case.moved_bytes)))
    sets = [case.draw() for _ in range(count)]
    cupy.cuda.Device().synchronize()

    def record(pointer: int) -> None:
        for i in range(LAUNCHES):
            kernels.launch(case.entry, pointer, **case.common, **sets[i % count])

    times, floor = time_graph(record, stream), case.moved_bytes / rate
    median = statistics.median(times)
    return {
        "kernel": case.entry,
        "what": case.note,
        "rows": rows,
        "megabytes": round(case.moved_bytes / 1e6, 3),
        "median_us": round(median, 2),
        "p90_us": round(times[int(0.9 * (len(times) - 1))], 2),
        "floor_us": round(floor, 2),
        "ratio": round(median / floor, 1) if floor >= FLOOR_THAT_COUNTS_US else None,
    }


if __name__ == "__main__":
    main()

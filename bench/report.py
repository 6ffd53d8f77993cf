"""Figures of a run: printed as a table, kept as JSON with the machine, the commit and the date."""

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

Row = Mapping[str, object]


def machine() -> str:
    """The processor, the cores that may be used, and the system, in words."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def commit() -> str:
    """The short name of the checked-out commit, with `+` if the working tree differs from it."""
    if stated := os.environ.get("DSUF_COMMIT"):  # a machine that got the files alone
        return stated
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "dsuf", "kernels"], capture_output=True, text=True, check=False
    )
    return name.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def time_ms(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 90th percentile of `repeats` runs of `work`, in milliseconds, after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), sorted(times)[math.ceil(0.9 * len(times)) - 1]


def publish(name: str, rows: Sequence[Row], device: str = "") -> Path:
    """Print `rows` as a table and write them to `results/<name>.json`; `device` names the GPU that ran them."""
    columns = list(rows[0])
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    head = {
        "machine": f"{device}; {machine()}" if device else machine(),
        "commit": commit(),
        "date": date,
        "rows": list(rows),
    }
    path.write_text(json.dumps(head, indent=1) + "\n")
    print(f"written: {path}")
    return path


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )

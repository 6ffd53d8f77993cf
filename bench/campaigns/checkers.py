"""Compute-sanitizer over every kernel: memory accesses, races in shared memory, reads of what nobody wrote.

A few cases of each kernel test at the smallest sizes run under each tool in one process, and one pass of the engine
through all layers. The race checker gets through kernels with clusters of blocks slowly or not at all: of those tests
it sees small cases, in a process each, and what does not end is named. Processes run beside each other.

    python bench/campaigns/checkers.py [--each 3] [--jobs 12] [--publish]
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.report import Row, publish

ROOT = Path(__file__).parents[2]
TOOLS = {"memcheck": ["--leak-check", "no"], "racecheck": [], "initcheck": []}
ENGINE = "tests/cuda/test_engine.py::test_layers_with_the_reference_s_input"
CLUSTERED = ("attend", "experts", "index", "norm", "pick", "project", "sample", "streams")
"""Files of tests whose kernels are launched as clusters, in part."""

TIMEOUT_S, APART_TIMEOUT_S = 120.0, 40.0
"""For the cases that share a process, and for a test that has one to itself."""

_COUNT = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?)")
_TESTS = re.compile(r"(\d+) passed")


def choose_cases(collected: Iterable[str], tool: str, each: int) -> list[str]:
    """Of the names of collected tests, for every test at the smallest sizes `each` cases, evenly spread, or two small
    ones where that is all that the tool gets through; pure."""
    by_test: dict[str, list[str]] = {}
    for name in collected:
        test, bracket, case = name.strip().partition("[")
        if bracket and "tiny" in re.split(r"[-\]]", case):
            by_test.setdefault(test, []).append(name.strip())
    slow = {test for test in by_test if tool == "racecheck" and is_clustered(test)}
    return [n for test, names in by_test.items() for n in (pick_small(names) if test in slow else spread(names, each))]


def is_clustered(test: str) -> bool:
    """Whether kernels of this test may be launched as clusters, by its file."""
    return Path(test.split("::")[0]).stem.removeprefix("test_") in CLUSTERED


def pick_small(names: Sequence[str]) -> list[str]:
    """Two cases of small numbers, zeros as few as there are."""

    def weigh(name: str) -> tuple[int, float]:
        numbers = [float(part) for part in re.findall(r"(?<=[-\[])\d+(?:\.\d+)?(?=[-\]])", name)]
        return numbers.count(0), sum(numbers)

    order = sorted(names, key=weigh)
    return list(dict.fromkeys([order[0], order[len(order) // 4]]))


def spread(names: Sequence[str], count: int) -> list[str]:
    """The first, the last and some between."""
    if len(names) <= count:
        return list(names)
    return [names[i * (len(names) - 1) // max(1, count - 1)] for i in range(count)]


def read_report(output: str) -> tuple[int | None, int]:
    """What a tool found, None if it does not say, and how many tests passed under it; pure."""
    found, passed = _COUNT.findall(output), _TESTS.findall(output)
    errors = sum(int(plain or races) for plain, races in found) if found else None
    return errors, sum(map(int, passed))


def collect() -> list[str]:
    """The names of all kernel tests."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def group(tool: str, cases: Sequence[str]) -> list[list[str]]:
    """The cases that share a process; pure."""
    if tool != "racecheck":
        return [[*cases, ENGINE]]
    apart: dict[str, list[str]] = {}
    for name in cases:
        test = name.split("[")[0]
        apart.setdefault(test if is_clustered(test) else "", []).append(name)
    return list(apart.values())


def is_shared(names: Sequence[str]) -> bool:
    """Whether a process has the cases of several tests; pure."""
    return len({name.split("[")[0] for name in names}) > 1


def run_under(tool: str, cases: Sequence[str], timeout_s: float) -> tuple[int | None, int]:
    """Errors and passed tests, as `read_report` tells them; None too where the tool did not end. Faults are printed."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--print-limit", "20", sys.executable, "-m", "pytest"]
    try:
        done = subprocess.run(
            [*command, "-q", "-p", "no:cacheprovider", *cases], cwd=ROOT, text=True, check=False, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, 0
    errors, passed = read_report(done.stdout)
    print(f"{tool}: {errors} errors, {passed} passed of {len(cases)}, {cases[0]}", flush=True)
    if errors or passed < len(cases):
        print(done.stdout[-4000:])
    return errors, passed


def check(tool: str, collected: Sequence[str], each: int, pool: Executor) -> Row:
    """A row of figures: what was found in how many cases, and which tests did not come to their end."""
    cases = choose_cases(collected, tool, each)
    start, errors, passed, unfinished = time.monotonic(), 0, 0, list[str]()
    groups = group(tool, cases)
    limits_s = [TIMEOUT_S if is_shared(names) else APART_TIMEOUT_S for names in groups]
    outcomes = list(pool.map(run_under, [tool] * len(groups), groups, limits_s))
    for names, (found, ended) in zip(groups, outcomes, strict=True):
        errors, passed = errors + (found or 0), passed + ended
        if found is None:
            unfinished += sorted({name.split("[")[0].split("::")[1] for name in names})
    count = sum(map(len, groups))
    return {
        "tool": tool, "cases": count, "passed": passed, "errors": errors, "unfinished": ", ".join(unfinished),
        "clean": not errors and (passed == count or bool(unfinished)),
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def main() -> None:
    """Check, print and with --publish keep the figures; exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=3, help="cases of each test")
    parser.add_argument("--tool", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=12, help="processes beside each other")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    collected, rows = collect(), list[Row]()
    with ThreadPoolExecutor(len(args.tool)) as tools, ThreadPoolExecutor(args.jobs) as pool:
        for row in tools.map(partial(check, collected=collected, each=args.each, pool=pool), args.tool):
            rows.append(row)
            print(row, flush=True)
    if args.publish:
        from dsuf.cuda.kernels import Device

        publish("checkers", rows, Device().name)
    sys.exit(not all(row["clean"] for row in rows))


if __name__ == "__main__":
    main()

"""Compute-sanitizer over every kernel: memory accesses, races in shared memory, reads of what nobody wrote.

A few cases of each kernel test at the smallest sizes run under each tool in one process, then one pass of the engine
through all layers. A tool that does not come to its end counts as failed.

    python bench/campaigns/checkers.py [--each 3] [--publish]
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.report import Row, publish

ROOT = Path(__file__).parents[2]
TOOLS = {"memcheck": ["--leak-check", "no"], "racecheck": [], "initcheck": []}
ENGINE = "tests/cuda/test_engine.py::test_layers_with_the_reference_s_input"
TIMEOUT_S = 240.0

_COUNT = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?)")
_TESTS = re.compile(r"(\d+) passed")


def choose_cases(collected: Iterable[str], each: int) -> list[str]:
    """Of the names of collected tests, for every test at the smallest sizes `each` cases, evenly spread; pure."""
    by_test: dict[str, list[str]] = {}
    for name in collected:
        test, bracket, case = name.strip().partition("[")
        if bracket and "tiny" in re.split(r"[-\]]", case):
            by_test.setdefault(test, []).append(name.strip())
    return [name for names in by_test.values() for name in spread(names, each)]


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


def check(tool: str, cases: Sequence[str]) -> Row:
    """A row of figures; what was found is printed."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--print-limit", "20", sys.executable, "-m", "pytest"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "-q", "-p", "no:cacheprovider", *cases, ENGINE], cwd=ROOT, text=True, check=False,
            timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = str(late.stdout or ""), -1
    errors, passed = read_report(output)
    clean = errors == 0 and passed == len(cases) + 1 and code == 0
    if not clean:
        print(output[-6000:])
    return {
        "tool": tool, "cases": len(cases) + 1, "passed": passed, "errors": errors, "clean": clean,
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def main() -> None:
    """Check, print and with --publish keep the figures; exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=3, help="cases of each test")
    parser.add_argument("--tool", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    cases = choose_cases(collect(), args.each)
    rows = []
    for tool in args.tool:
        rows.append(check(tool, cases))
        print(rows[-1], flush=True)
    if args.publish:
        from dsuf.cuda.kernels import Device

        publish("checkers", rows, Device().name)
    sys.exit(not all(row["clean"] for row in rows))


if __name__ == "__main__":
    main()

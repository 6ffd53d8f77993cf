"""Tiers, the golden directory, and a sign of life from long tests.

Short tier: everything without a mark. `--full` adds tests marked `full`. A test that this machine cannot run is skipped
with a reason, and every reason is listed at the end, above the count.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Set before NumPy is loaded: threads of matrix products wait by spinning, and a busy machine then crawls.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# How long an example takes says more about what else the machine does.
settings.register_profile("timeless", deadline=None)
settings.load_profile("timeless")

SIGN_OF_LIFE_S = 30.0
OWN_GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full`."""
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`: all that this machine can")


def pytest_configure(config: pytest.Config) -> None:
    """Start the sign of life: in the process that prints, not in its workers (pytest-xdist)."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SignOfLife(), "sign-of-life")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the full tier out unless it was asked for."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say loudly what did not run, and why."""
    reasons: Counter[str] = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if not config.getoption("--full"):
        left_out = len(terminalreporter.stats.get("deselected", []))
        if left_out:
            reasons["full tier or other selection; `bin/test --full` runs all"] = left_out
    if reasons:
        terminalreporter.section("NOT RUN", yellow=True, bold=True)
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"NOT RUN: {count} x {reason}")


class SignOfLife:
    """Prints every half minute which tests run and since when, so that a watcher can tell long from stuck."""

    def __init__(self) -> None:
        # While a test runs, pytest redirects the output of the process; at this point it does not.
        self.output = os.dup(1)
        self.running = {"collection": time.monotonic()}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="sign-of-life", daemon=True)

    def pytest_sessionstart(self) -> None:
        """Begin to watch."""
        self.thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.running.pop("collection", None)
        self.running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self.running.pop(nodeid, None)

    def pytest_sessionfinish(self) -> None:
        """The last test has ended."""
        self.over.set()

    def watch(self) -> None:
        """Write a line an interval until the session is over."""
        while not self.over.wait(SIGN_OF_LIFE_S):
            now_s = time.monotonic()
            running = list(self.running.items()) or [("between two tests", now_s)]
            lines = [f"... {name}: running for {now_s - since_s:.0f} s\n" for name, since_s in running]
            os.write(self.output, "".join(["\n", *lines]).encode())


@pytest.fixture(scope="session")
def golden_dir() -> Iterator[Path]:
    """The golden directory: DSUF_GOLDEN if set, else the reduced one in tests/golden; skips where there is none."""
    folder = Path(os.environ.get("DSUF_GOLDEN", OWN_GOLDEN))
    if not (folder / "cases").is_dir():
        pytest.skip(f"no golden directory at {folder} (set DSUF_GOLDEN)")
    yield folder

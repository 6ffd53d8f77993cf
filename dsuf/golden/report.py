"""The table: a line for each comparison, written as soon as it is made."""

import time
from typing import TextIO

from dsuf.golden.measure import Array, Distance, count_equal
from dsuf.golden.tolerance import Tolerance

_LINE = "{:<14} {:<8} {:<40} {:<42} {:<40} {}"
_HEAD = ("case", "flavour", "layer or output", "error (median/max) or share", "limit", "verdict")


class Report:
    """Counts verdicts and writes rows to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started_s = time.monotonic()
        self._failures: list[str] = []
        self._missing: list[str] = []
        self._held = 0
        self._apart = {"absent": 0, "not yet": 0, "not compared": 0}
        self._headed = False

    def judge(self, case: str, flavour: str, item: str, shown: str, limit: str, holds: bool) -> None:
        """A row with a verdict."""
        if holds:
            self._held += 1
        else:
            self._failures.append(" ".join(filter(None, (case, flavour, item))))
        self._row(case, flavour, item, shown, limit, "ok" if holds else "FAIL")

    def judge_rows(self, case: str, flavour: str, item: str, distance: Distance, tolerance: Tolerance) -> None:
        """A row for the errors of rows under `tolerance`."""
        self.judge(case, flavour, item, str(distance), str(tolerance), tolerance.allows(distance))

    def judge_equal(self, case: str, flavour: str, item: str, own: Array, recorded: Array) -> None:
        """A row that holds if all elements are equal."""
        equal, total = count_equal(own, recorded)
        self.judge(case, flavour, item, f"{equal} of {total} equal", "all equal", equal == total)

    def show(self, case: str, flavour: str, item: str, shown: str, verdict: str) -> None:
        """A row whose verdict is given elsewhere, by the row that `verdict` names."""
        self._row(case, flavour, item, shown, "", verdict)

    def set_apart(self, case: str, flavour: str, item: str, verdict: str, shown: str = "") -> None:
        """A row that is neither held nor failed: `absent`, `not yet` or `not compared`."""
        self._apart[verdict] += 1
        self._row(case, flavour, item, shown, "", verdict)

    def miss(self, case: str, flavour: str, item: str) -> None:
        """A row for what should have been there to compare with: absent, and not in order."""
        self._missing.append(" ".join(filter(None, (case, flavour, item))))
        self.set_apart(case, flavour, item, "absent")

    @property
    def exit_code(self) -> int:
        """0 if something was compared, all of it holds and nothing was missed, else 1."""
        return 0 if self._held and not self._failures and not self._missing else 1

    def close(self) -> None:
        """Name the rows that failed and what was missed, then the totals."""
        for failure in self._failures:
            self._write(f"FAIL {failure}")
        for missing in self._missing:
            self._write(f"ABSENT {missing}")
        apart = "".join(f", {count} {word}" for word, count in self._apart.items() if count)
        took_s = time.monotonic() - self._started_s
        self._write(f"golden: {self._held} rows hold, {len(self._failures)} fail{apart} ({took_s:.0f} s)")

    def _row(self, *columns: str) -> None:
        if not self._headed:
            self._write(_LINE.format(*_HEAD))
            self._headed = True
        self._write(_LINE.format(*columns))

    def _write(self, line: str) -> None:
        print(line.rstrip(), file=self._stream, flush=True)

"""Who looks after one program of a fleet: an end is told in a line, then it begins again, as under a supervisor."""

import signal
import time
from collections.abc import Callable

from dsuf.errors import CommandError
from dsuf.trial.program import Program

WINDOW_S = 60.0
MOST_STARTS = 3
_PAUSE_S = 1.0


class Keeper:
    """Starts `program` again where it has ended by itself: after a second, after twice as long the next time. One that
    ends again after `MOST_STARTS` starts within `WINDOW_S` seconds stays `away`. `ready` is asked after each start.
    """

    def __init__(
        self, program: Program, tell: Callable[[str], None], ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.program, self.away = program, False
        self._tell, self._ready, self._clock = tell, ready, clock
        self._ends_s: list[float] = []
        self._due_s: float | None = None
        self._coming = False

    def look(self) -> None:
        """Do what is to be done now; it never waits for the program. To be called a few times a second."""
        if self.away:
            return
        if self.program.code is None:
            if self._coming and self._ready():
                self._coming = False
                self._tell(f"{self.program.name} is ready again")
        elif self._due_s is None:
            self._plan(self._clock())
        elif self._clock() >= self._due_s:
            self._begin()

    def _plan(self, now_s: float) -> None:
        """It has ended: tell it, and when it begins again."""
        self._ends_s = [*(end_s for end_s in self._ends_s if now_s - end_s < WINDOW_S), now_s]
        starts = len(self._ends_s) - 1
        self.away = starts >= MOST_STARTS
        if self.away:
            then = f"it stays away, after {starts} starts within {WINDOW_S:.0f} s"
        else:
            pause_s = _PAUSE_S * 2**starts
            self._due_s = now_s + pause_s
            then = f"it starts again in {pause_s:.0f} s"
        self._tell(describe_end(self.program, then))

    def _begin(self) -> None:
        """Start it; where that fails it has ended once more."""
        self._due_s, self._coming = None, True
        try:
            self.program.start()
        except CommandError as error:
            self._tell(str(error))


def describe_end(program: Program, then: str = "") -> str:
    """A line that says how `program` ended, `then` what follows; below it what the program complained of, if it did."""
    code = program.code or 0
    how = f"code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
    end = f"{program.name} ended with {how}" + (f"; {then}" if then else "")
    return "\n  ".join((end, *program.complaints()))

"""How late the event loop runs: the one figure that says whether something computes on it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

PERIOD_S = 0.1  # waking an idle process costs some 0.1 ms, so a hundred times a second would be 1 % of a core
WINDOW = 600


class LagSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness of the loop over the last `samples` wake-ups, in seconds."""

    samples: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


class LoopLag:
    """Sleeps for short periods and records by how much each wake-up came late.

    `observe` gets every sample (a histogram, say). `last_tick_s` is the monotonic time of the last wake-up, so that
    another thread can tell that the loop stands still.
    """

    def __init__(self, observe: Callable[[float], None] = lambda lag_s: None, period_s: float = PERIOD_S) -> None:
        self._observe = observe
        self._period_s = period_s
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self.last_tick_s = time.monotonic()

    async def run(self) -> None:
        """Sample until cancelled."""
        self.last_tick_s = time.monotonic()
        while True:
            due = time.monotonic() + self._period_s
            await asyncio.sleep(self._period_s)
            self.last_tick_s = time.monotonic()
            lag_s = max(0.0, self.last_tick_s - due)
            self._samples.append(lag_s)
            self._observe(lag_s)

    def summarise(self) -> LagSummary:
        """The figures over the last minute or so."""
        return summarise_lag(list(self._samples))


def summarise_lag(samples: list[float]) -> LagSummary:
    """Median, 99th percentile (nearest rank) and maximum of `samples`."""
    if not samples:
        return LagSummary()
    ordered = sorted(samples)
    last = len(ordered) - 1
    return LagSummary(
        samples=len(ordered), p50_s=ordered[last // 2], p99_s=ordered[-(-99 * last // 100)], max_s=ordered[last]
    )

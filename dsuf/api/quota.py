"""What a key may have under way at once, and begin within a minute."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import msgspec

from dsuf.api.keyring import Key
from dsuf.errors import RateLimited

_MINUTE_S = 60.0
_WAIT_S = 1  # for a request of the same key to end: nobody knows how long that takes
_METERS = 1024  # above so many, those of keys that have not been seen for a minute are dropped


class Meter(msgspec.Struct):
    """What one key has under way, and how many requests it may begin now: refilled with time, at most a minute's."""

    running: int
    left: float
    looked_s: float


class Quotas:
    """The meters of all keys. They outlive a change of the keys, so that reading these again gives nobody more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    @contextlib.contextmanager
    def hold(self, key: Key) -> Iterator[None]:
        """Count one request with `key` while the block runs; raises `RateLimited` where it is one too many."""
        if not (key.concurrent or key.per_minute):
            yield
            return
        meter = self._look_at(key)
        if key.concurrent and meter.running >= key.concurrent:
            text = f"this key has {meter.running} requests under way, which is as many as it may"
            raise RateLimited(text, retry_after_s=_WAIT_S)
        if key.per_minute and meter.left < 1:
            wait_s = (1 - meter.left) * _MINUTE_S / key.per_minute
            text = f"this key may begin {key.per_minute} requests a minute; the next in {wait_s:.3g} s"
            raise RateLimited(text, retry_after_s=math.ceil(wait_s))
        meter.left -= 1
        meter.running += 1
        try:
            yield
        finally:
            meter.running -= 1

    def _look_at(self, key: Key) -> Meter:
        """The meter of `key`, filled up to now."""
        now_s = self._clock()
        meter = self._meters.get(key.text)
        if meter is None:
            self._forget(now_s)
            meter = self._meters[key.text] = Meter(0, float(key.per_minute), now_s)
        meter.left = refill(meter.left, now_s - meter.looked_s, key.per_minute)
        meter.looked_s = now_s
        return meter

    def _forget(self, now_s: float) -> None:
        """Drop meters that are full and idle, where there are many."""
        if len(self._meters) >= _METERS:
            old = [text for text, m in self._meters.items() if not m.running and now_s - m.looked_s > _MINUTE_S]
            for text in old:
                del self._meters[text]


def refill(left: float, seconds: float, per_minute: int) -> float:
    """How many requests may begin after so many more seconds."""
    return min(float(per_minute), left + seconds * per_minute / _MINUTE_S)

"""What goes wrong again and again: told once when it begins and once when it is over, tried again later each time."""

import random
import time

from dsuf.kv.directory.contract import Health
from dsuf.kv.directory.pace import Pace
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics


class Trouble:
    """The state of one kind of work, `what`, which fails or goes well."""

    def __init__(self, what: str, pace: Pace, metrics: Metrics) -> None:
        self.text: str | None = f"{what}: not begun"
        self._what, self._pace, self._metrics = what, pace, metrics
        self._since_s = time.monotonic()
        self._wait_s = pace.retry_s
        self._told = False

    def fail(self, error: Exception) -> float:
        """It failed by `error`; the seconds after which to try again, which differ from node to node."""
        self._metrics.fleet.count_error()
        if self.text is None:
            self._since_s = time.monotonic()
        self.text = f"{self._what}: {error}"
        if not self._told:
            log_event("directory in trouble", level="warning", what=self._what, reason=str(error))
            self._told = True
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, self._pace.retry_most_s)
        return wait_s * random.uniform(0.5, 1.0)

    def clear(self) -> None:
        """It went well."""
        if self._told:
            log_event("directory well again", what=self._what, after_s=round(time.monotonic() - self._since_s, 1))
        self.text, self._told, self._wait_s = None, False, self._pace.retry_s

    def health(self) -> Health:
        """How it does."""
        if self.text is None:
            return Health()
        return Health(trouble=self.text, since_s=time.monotonic() - self._since_s)

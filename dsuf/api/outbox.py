"""What a step gives all streams, written to their clients together."""

import time
from typing import Protocol

from dsuf.observe.log import log_event


class Writer(Protocol):
    """A stream to a client."""

    def write(self, data: bytes, now_s: float) -> None:
        """Give `data` to the connection, without waiting."""


class Outbox:
    """Bytes for many streams, written one after the other by `flush`, which the scheduler calls behind each step.

    To read one reply, write it, and read the next costs a third more than first to read all and then to write all: the
    way into the system and back drives out of the processor's caches what the other half needs.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Writer, bytes]] = []

    def put(self, writer: Writer, data: bytes) -> None:
        """Have `data` written behind the step under way."""
        self._waiting.append((writer, data))

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        now_s = time.monotonic()
        for writer, data in waiting:
            try:
                writer.write(data, now_s)
            except Exception as error:  # the stream's own business, which it hears of with its next write
                log_event("write failed", level="error", error=error)

"""What goes out to clients in one turn of the event loop, written at its end."""

import asyncio
import time
from typing import Protocol


class Writer(Protocol):
    """A stream to a client."""

    def write(self, data: bytes, now_s: float) -> None:
        """Give `data` to the connection, without waiting."""


class Outbox:
    """Bytes for many streams, written one after the other.

    A step gives every stream something. To read one reply, write it, and read the next costs a third more than first to
    read all and then to write all: the way into the system and back drives out of the processor's caches what the
    other half needs.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Writer, bytes]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, writer: Writer, data: bytes) -> None:
        """Have `data` written before the loop rests."""
        if not self._waiting:
            self._loop = self._loop or asyncio.get_running_loop()
            self._loop.call_soon(self.flush)
        self._waiting.append((writer, data))

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        now_s = time.monotonic()
        for writer, data in waiting:
            writer.write(data, now_s)

"""Server-sent events to one client: frames, comments in silence, a deadline for each write."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from aiohttp import web

from dsuf.api.exchange import Exchange
from dsuf.api.outbox import Outbox
from dsuf.types import Event

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_FLUSH_TRIES, _FLUSH_PAUSE_S = 50, 0.02


def frame(events: Sequence[Event]) -> bytes:
    """Events as they go over the wire."""
    if len(events) == 1 and events[0].name is None:  # as nearly always
        return f"data: {events[0].data}\n\n".encode()
    return "".join([_frame_one(event.name, event.data) for event in events]).encode()


def frame_data(data: str) -> bytes:
    """An unnamed event."""
    return _frame_one(None, data).encode()


def _frame_one(name: str | None, data: str) -> str:
    """One event; JSON has no line ends, so one data line holds it."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


class WriteDeadline:
    """Calls `abort` once a write has waited for longer than `limit_s`: the client does not read.

    One timer serves a whole stream and is set anew when it fires; one for each write would cost as much as the write.
    """

    def __init__(self, limit_s: float, abort: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._abort = abort
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, now_s: float) -> None:
        """A write begins; one that waits already counts from its own beginning."""
        if self._since_s is None:
            self._since_s = now_s
        if self._timer is None:
            self._set(self._limit_s)

    def end(self) -> None:
        """It is done."""
        self._since_s = None

    def close(self) -> None:
        """There will be no further write."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _set(self, wait_s: float) -> None:
        """Look at the write in `wait_s`."""
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        """Abort if the write that waits now is overdue, else look again when it, or the next one, would be."""
        now_s = time.monotonic()
        left_s = self._limit_s if self._since_s is None else self._since_s + self._limit_s - now_s
        if left_s > 0:
            self._set(left_s)
        else:
            self._abort()


class EventStream:
    """The response of a streaming request, for use in a `with`; `close` or `break_off` ends it.

    Every write raises a `ConnectionError`, or is cancelled with its handler, once the client has gone. A client that
    takes nothing for longer than the write deadline has. `free` says whether it has taken everything so far, so that
    more can be pushed.
    """

    def __init__(self, request: web.Request, exchange: Exchange, outbox: Outbox, *, write_timeout_s: float) -> None:
        self._request, self._outbox = request, outbox
        self._exchange = exchange
        self._deadline = WriteDeadline(write_timeout_s, self._abort)
        self._written_s = time.monotonic()
        self._transport = request.transport
        self.free = False
        self.response = web.StreamResponse(headers=_HEADERS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._deadline.close()

    async def open(self) -> None:
        """Send the status and the headers."""
        await self.response.prepare(self._request)

    def push(self, data: bytes) -> None:
        """Have `data` written to a client that is `free`, behind the step under way.

        The bytes are those that `send` writes, which goes a longer way: through four coroutines, once for every token.
        """
        self.free = False
        self._outbox.put(self, b"%x\r\n%b\r\n" % (len(data), data))

    def write(self, data: bytes, now_s: float) -> None:
        """Give what was pushed to the connection, if there still is one."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._written_s = now_s
            transport.write(data)
            self.free = not transport.get_write_buffer_size()

    async def send(self, data: bytes) -> None:
        """Write `data`; waits while the client does not read, for at most the write deadline."""
        self._outbox.flush()  # what was pushed comes first
        self.free = False
        self._written_s = time.monotonic()
        self._exchange.blocked = True  # true beyond this call only where the write had to wait and was interrupted
        self._deadline.begin(self._written_s)
        await self.response.write(data)
        self._deadline.end()
        self._exchange.blocked = False
        # The head is out now. Only chunks can be pushed, and no empty one, which would be the end.
        self._transport = self._request.transport
        chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        self.free = chunked and self._transport is not None and not self._transport.get_write_buffer_size()

    @contextlib.asynccontextmanager
    async def keep_alive(self, interval_s: float) -> AsyncIterator[None]:
        """Send a comment after every `interval_s` of silence while the block runs."""
        task = asyncio.create_task(self._comment(interval_s))
        try:
            yield
        finally:
            task.cancel()

    async def close(self) -> None:
        """End the response in the regular way."""
        self._outbox.flush()
        await self.response.write_eof()

    async def break_off(self, data: bytes) -> None:
        """Send `data`, then break the connection, so that the client cannot take what it got for a whole reply."""
        await self.send(data)
        for _ in range(_FLUSH_TRIES):
            transport = self._request.transport
            if transport is None or not transport.get_write_buffer_size():
                break
            await asyncio.sleep(_FLUSH_PAUSE_S)
        self._abort()

    async def _comment(self, interval_s: float) -> None:
        """Break silence until cancelled. A client found gone here is left to the next write to report."""
        with contextlib.suppress(ConnectionError):
            while True:
                wait_s = self._written_s + interval_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                elif self._exchange.blocked:  # the client does not read: there is enough for it to read already
                    await asyncio.sleep(interval_s)
                else:
                    await self.send(KEEP_ALIVE)

    def _abort(self) -> None:
        """Drop the connection and what is still to be sent."""
        if self._request.transport is not None:
            self._request.transport.abort()

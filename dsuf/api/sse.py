"""Server-sent events to one client: frames, comments in silence, a deadline for each write."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable

from aiohttp import web

from dsuf.api.exchange import Exchange
from dsuf.types import Event

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_FLUSH_TRIES, _FLUSH_PAUSE_S = 50, 0.02


class SlowClient(ConnectionError):
    """The client did not read for longer than the write deadline; its connection is aborted."""


def frame(events: Iterable[Event]) -> bytes:
    """Events as they go over the wire."""
    return b"".join(_frame_one(event.name, event.data) for event in events)


def frame_data(data: str) -> bytes:
    """An unnamed event."""
    return _frame_one(None, data)


def _frame_one(name: str | None, data: str) -> bytes:
    """One event; JSON has no line ends, so one data line holds it."""
    return (f"event: {name}\n" if name is not None else "").encode() + b"data: " + data.encode() + b"\n\n"


class EventStream:
    """The response of a streaming request. Every write raises a `ConnectionError` once the client has gone."""

    def __init__(self, request: web.Request, exchange: Exchange, *, write_timeout_s: float) -> None:
        self._request = request
        self._exchange = exchange
        self._write_timeout_s = write_timeout_s
        self._written_s = time.monotonic()
        self.response = web.StreamResponse(headers=_HEADERS)

    async def open(self) -> None:
        """Send the status and the headers."""
        await self.response.prepare(self._request)

    async def send(self, data: bytes) -> None:
        """Write `data`; waits while the client does not read, for at most the write deadline."""
        self._written_s = time.monotonic()
        self._exchange.blocked = True  # true beyond this call only where the write had to wait and was interrupted
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(data)
        except TimeoutError as error:
            self._abort()
            raise SlowClient("the client does not read") from error
        self._exchange.blocked = False

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

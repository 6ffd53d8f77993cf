"""Reading a peer's arena over TCP: bytes go from the socket into the buffers they are for."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from dsuf.errors import PeerError, PeerLost
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.transport.data import BYTES, END, FAILED, FETCH_BYTES, HEAD, STALL_S, Drop, Fetch
from dsuf.kv.transport.hello import Stream
from dsuf.kv.transport.runs import CHUNK_BYTES, join_neighbours
from dsuf.kv.transport.wire import LENGTH

_TEXT_BYTES = 256
_AT_ONCE_BYTES = 1 << 20
"""So much of a chunk should have come before the event loop is woken for it, where that can be had."""


class TcpMover:
    """Implements `Mover` over connections that `dial` makes, one at a time."""

    def __init__(self, dial: Callable[[], Awaitable[Stream]], stall_s: float = STALL_S) -> None:
        self._dial, self._stall_s = dial, stall_s
        self._inlet: Inlet | None = None
        self._dialling = asyncio.Lock()
        self._closed = False

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """As `Mover.read`. What still comes after the call has ended is thrown away."""
        if self._closed:
            raise PeerLost("closed")
        async with self._dialling:
            if self._inlet is None or self._inlet.lost is not None:
                self._inlet = await self._open()
            inlet = self._inlet
        await inlet.fetch(offer.id, pieces, into)

    def close(self) -> None:
        """Break off."""
        self._closed = True
        if self._inlet is not None:
            self._inlet.end("closed")

    async def _open(self) -> "Inlet":
        """A connection whose bytes go to an inlet from now on."""
        stream = await self._dial()
        transport: Any = stream.writer.transport
        if self._closed:
            transport.abort()
            raise PeerLost("closed")
        # How a transport reads is settled when it begins to, hence the pause.
        transport.pause_reading()
        inlet = Inlet(stream, self._stall_s)
        transport.set_protocol(inlet)
        transport.resume_reading()
        return inlet


class _Coming:
    """A fetch under way: where its bytes go, and how many came. Nothing goes there once it is `ended`."""

    def __init__(self, runs: list[memoryview], size_bytes: int, ended: asyncio.Future[None]) -> None:
        self.runs, self.size_bytes, self.ended = runs, size_bytes, ended
        self.run = self.at = self.came_bytes = 0

    def room(self) -> memoryview | None:
        """Where its next bytes go; None where they are too many."""
        while self.run < len(self.runs) and self.at == len(self.runs[self.run]):
            self.run, self.at = self.run + 1, 0
        return self.runs[self.run][self.at :] if self.run < len(self.runs) else None

    def advance(self, size_bytes: int) -> None:
        """So many came."""
        self.at += size_bytes
        self.came_bytes += size_bytes


class Inlet(asyncio.BufferedProtocol):
    """The reading end of a data connection: hands the socket the place where the next bytes belong.

    Bytes are received on the event loop, between asking for the place and being told of them, so a place can be given
    back to its owner at any other moment.
    """

    def __init__(self, stream: Stream, stall_s: float) -> None:
        self.lost: PeerLost | None = None
        self._stream, self._stall_s = stream, stall_s  # a writer that nobody holds closes its transport
        self._transport = stream.writer.transport
        self._loop = asyncio.get_running_loop()
        self._fetches: dict[int, _Coming] = {}
        self._number = 0
        self._head = memoryview(bytearray(HEAD.size))
        self._head_at = 0
        self._left, self._kind = 0, BYTES
        self._coming: _Coming | None = None
        self._text = b""
        self._waste = memoryview(bytearray(CHUNK_BYTES // 16))
        secure = self._transport.get_extra_info("ssl_object") is not None  # where bytes are not those of the socket
        self._socket = None if secure else self._transport.get_extra_info("socket")
        self._least_bytes = 1
        self._moved_s = self._loop.time()
        self._timer = self._loop.call_later(stall_s / 2, self._watch)

    async def fetch(self, offer: int, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Have `pieces` sent, and wait until they fill `into`; raises `PeerError`."""
        if self.lost is not None:
            raise PeerLost(str(self.lost))
        self._number += 1
        number, ended = self._number, self._loop.create_future()
        if not self._fetches:
            self._moved_s = self._loop.time()
        wanted = _pack(Fetch(number, offer, tuple(pieces), tuple(map(len, into))))
        self._fetches[number] = _Coming(join_neighbours(into), sum(map(len, into)), ended)
        self._tell(wanted)
        try:
            await ended
        finally:
            if not ended.done() or ended.cancelled():
                self._tell(_pack(Drop(number)))

    def end(self, why: str) -> None:
        """Give the connection up; idempotent."""
        if self.lost is None:
            self.lost = PeerLost(why)
            self._timer.cancel()
            self._transport.abort()
            for coming in self._fetches.values():
                if not coming.ended.done():
                    coming.ended.set_exception(PeerLost(why))
            self._fetches.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes belong."""
        if not self._left:
            return self._head[self._head_at :]
        room = None
        if self._kind == BYTES and self._coming is not None and not self._coming.ended.done():
            room = self._coming.room()  # None where more came than was asked for, which shows at its end
        return (self._waste if room is None else room)[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes are there now."""
        self._moved_s = self._loop.time()
        if not self._left:
            self._head_at += nbytes
            if self._head_at == HEAD.size:
                self._head_at = 0
                self._begin(*HEAD.unpack(self._head))
            return
        if self._kind == FAILED:
            self._text += bytes(self._waste[:nbytes])
        elif self._coming is not None:
            self._coming.advance(nbytes)
        self._left -= nbytes
        self._wait_for(_AT_ONCE_BYTES if self._left >= _AT_ONCE_BYTES else 1)
        if not self._left and self._kind == FAILED:
            self._fail()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has hung up, or the connection broke."""
        self.end("it has hung up" if exc is None else f"the connection broke: {exc}")

    def eof_received(self) -> None:
        """The other side has hung up."""

    def _begin(self, number: int, size_bytes: int, kind: int) -> None:
        """What follows a head."""
        self._left, self._kind, self._coming = size_bytes, kind, self._fetches.get(number)
        if size_bytes > (CHUNK_BYTES if kind == BYTES else _TEXT_BYTES if kind == FAILED else 0):
            # Not here and now: the event loop is in the midst of reading into a buffer.
            self._loop.call_soon(self.end, "a chunk that makes no sense")
        elif kind == END and (coming := self._fetches.pop(number, None)) is not None and not coming.ended.done():
            if coming.came_bytes == coming.size_bytes:
                coming.ended.set_result(None)
            else:
                coming.ended.set_exception(PeerError(f"{coming.came_bytes} bytes of {coming.size_bytes}"))
        elif kind == FAILED:
            self._text = b""
            self._fetches.pop(number, None)
            if not size_bytes:
                self._fail()

    def _wait_for(self, size_bytes: int) -> None:
        """Let the socket be quiet until so much is there; it has to be on its way."""
        if self._socket is not None and size_bytes != self._least_bytes:
            self._least_bytes = size_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _fail(self) -> None:
        """A fetch was refused, or cut short."""
        if self._coming is not None and not self._coming.ended.done():
            self._coming.ended.set_exception(PeerError(self._text.decode(errors="replace")))

    def _tell(self, frame: bytes) -> None:
        """Send a small frame, or find that the other side reads none."""
        if self._transport.get_write_buffer_size() > FETCH_BYTES:
            self.end("it does not read what it is told")
        elif self.lost is None:
            self._transport.write(frame)

    def _watch(self) -> None:
        """Give up where something is to come and nothing does."""
        if self._fetches and self._loop.time() - self._moved_s > self._stall_s:
            self.end(f"nothing came for {self._stall_s:g} s")
        elif self.lost is None:
            self._timer = self._loop.call_later(self._stall_s / 2, self._watch)


def _pack(message: Fetch | Drop) -> bytes:
    """A frame; raises `PeerError` where it is too large."""
    frame = msgspec.msgpack.encode(message)
    if len(frame) > FETCH_BYTES:
        raise PeerError(f"a fetch of {len(frame)} bytes, at most {FETCH_BYTES}")
    return LENGTH.pack(len(frame)) + frame

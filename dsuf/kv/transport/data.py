"""Bytes over TCP, on a connection of their own: what goes over it, and the side that sends.

The reader sends frames as on a control connection: `Fetch`, `Drop`. The other side answers one fetch after the other,
in chunks: `HEAD` (number, length, kind), then so many bytes.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable

import msgspec

from dsuf.errors import DsufError, PeerError
from dsuf.kv.handoff import Piece
from dsuf.kv.transport.hello import Stream
from dsuf.kv.transport.runs import CHUNK_BYTES, cut_chunks, join_neighbours
from dsuf.kv.transport.streams import StreamWire, close_stream

HEAD = struct.Struct(">QIB")
BYTES, END, FAILED = 0, 1, 2
FETCH_BYTES = 1 << 20
"""Largest frame of the reader: a slice of pages takes some kilobytes."""
MOST_FETCHES = 256
STALL_S = 10.0
"""Where nothing moves for so long, the connection is given up."""
_SMALL_BYTES = 16_384


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Send the beginnings of `pieces` of an offer, `sizes` bytes of each, as `number`."""

    number: int
    offer: int
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Send no more of `number`."""

    number: int


View = Callable[[int, Piece], memoryview]
"""A block of an offer; raises `CheckpointError` where it is not lent to who asks, or not any more."""

_decoder = msgspec.msgpack.Decoder(Fetch | Drop)


class Outlet:
    """Sends what the reader behind `stream` fetches. `on_sent` is told of bytes that went out."""

    def __init__(self, stream: Stream, view: View, on_sent: Callable[[int], None], stall_s: float = STALL_S) -> None:
        self._stream, self._view, self._on_sent, self._stall_s = stream, view, on_sent, stall_s
        self._wire = StreamWire(stream, FETCH_BYTES)
        self._fetches: deque[Fetch] = deque()
        self._wanted: set[int] = set()
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Serve until the connection ends; raises `PeerError` for the reason."""
        self._stream.writer.transport.set_write_buffer_limits(high=CHUNK_BYTES)
        sending = asyncio.ensure_future(self._send_all())
        try:
            receiving = asyncio.ensure_future(self._receive_all())
            try:
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                receiving.cancel()
                sending.cancel()
                self._wire.close()
                ended = await asyncio.gather(receiving, sending, return_exceptions=True)
            raise next((e for e in ended if isinstance(e, PeerError)), PeerError("the connection ended"))
        finally:
            await close_stream(self._stream)

    async def _receive_all(self) -> None:
        """Take what the reader wants."""
        while True:
            try:
                message = _decoder.decode(await self._wire.receive())
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise PeerError(f"a message that cannot be read: {error}") from error
            if isinstance(message, Drop):
                self._wanted.discard(message.number)
            elif len(self._fetches) >= MOST_FETCHES or len(message.pieces) != len(message.sizes):
                raise PeerError("a fetch that makes no sense, or too many at a time")
            else:
                self._fetches.append(message)
                self._wanted.add(message.number)
                self._more.set()

    async def _send_all(self) -> None:
        """Serve one fetch after the other."""
        while True:
            while not self._fetches:
                self._more.clear()
                await self._more.wait()
            fetch = self._fetches.popleft()
            try:
                await self._send(fetch)
                kind, text = END, b""
            except DsufError as error:
                if isinstance(error, PeerError):
                    raise
                kind, text = FAILED, str(error).encode()[:256]
            self._wanted.discard(fetch.number)
            self._stream.writer.write(HEAD.pack(fetch.number, len(text), kind) + text)

    async def _send(self, fetch: Fetch) -> None:
        """Send the bytes of one fetch, as long as they are wanted and lent; raises `CheckpointError`."""
        views = [self._view(fetch.offer, piece)[:size] for piece, size in zip(fetch.pieces, fetch.sizes, strict=True)]
        writer = self._stream.writer
        for chunk in cut_chunks(join_neighbours(views)):
            if fetch.number not in self._wanted:
                return
            self._view(fetch.offer, fetch.pieces[0])
            size_bytes = sum(map(len, chunk))
            writer.write(HEAD.pack(fetch.number, size_bytes, BYTES))
            for part in [b"".join(chunk)] if size_bytes < _SMALL_BYTES * len(chunk) else chunk:
                writer.write(part)
            await self._drain()
            self._on_sent(size_bytes)

    async def _drain(self) -> None:
        """Wait until there is room for a chunk; raises `PeerError` where nothing is read any more."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._stream.writer.drain()
        except TimeoutError as error:
            raise PeerError(f"nothing was read for {self._stall_s:g} s") from error
        except OSError as error:
            raise PeerError(f"the connection broke: {error}") from error

"""Connections over TCP or TLS: frames on a stream, and dialling another node."""

import asyncio
import contextlib

from dsuf.errors import PeerError, PeerLost
from dsuf.kv.transport.hello import Credentials, Purpose, Stream, Terms, call
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.wire import FRAME_BYTES, LENGTH

DIAL_S = 5.0
"""Until a connection stands, proofs included."""
STREAM_BYTES = 1 << 20
_UNREAD_BYTES = 8 * FRAME_BYTES
_CLOSE_S = 1.0


class StreamWire:
    """Implements `Wire` over a stream: each frame has its length before it."""

    def __init__(self, stream: Stream, frame_bytes: int = FRAME_BYTES) -> None:
        self._stream, self._frame_bytes = stream, frame_bytes

    def send(self, frame: bytes) -> None:
        """Queue a frame; raises `PeerLost` where the other side has left too many unread."""
        writer = self._stream.writer
        if writer.is_closing():
            raise PeerLost("the connection is closed")
        if writer.transport.get_write_buffer_size() > _UNREAD_BYTES:
            raise PeerLost("it does not read what it is told")
        writer.write(LENGTH.pack(len(frame)))
        writer.write(frame)

    async def receive(self) -> bytes:
        """The next frame; raises `PeerLost`, or `PeerError` for one that is too large."""
        try:
            (size,) = LENGTH.unpack(await self._stream.reader.readexactly(LENGTH.size))
            if size > self._frame_bytes:
                raise PeerError(f"a frame of {size} bytes, at most {self._frame_bytes}")
            return await self._stream.reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise PeerLost("it has hung up") from error
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error

    def close(self) -> None:
        """End the connection; what was not sent yet is lost."""
        self._stream.writer.transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the descriptor is closed."""
        await close_stream(self._stream)


class Address:
    """Where `other` listens, and what this node shows to get in."""

    def __init__(
        self, me: NodeName, other: NodeName, host: str, port: int, terms: Terms, credentials: Credentials,
        dial_s: float = DIAL_S,
    ) -> None:  # fmt: skip
        self.other = other
        self._me, self._host, self._port = me, host, port
        self._terms, self._credentials, self._dial_s = terms, credentials, dial_s

    async def dial(self, purpose: Purpose) -> tuple[Stream, Terms]:
        """A connection on which both sides have proved themselves, and the other's terms.

        Raises `PeerLost` where it cannot be reached in time, `PeerError` where it is not of this fleet.
        """
        stream = None
        try:
            async with asyncio.timeout(self._dial_s):
                secure = self._credentials.calls
                name = None if secure is None else ""  # names are in the hello, and compared with the certificate
                stream = Stream(
                    *await asyncio.open_connection(
                        self._host, self._port, ssl=secure, server_hostname=name, limit=STREAM_BYTES
                    )
                )
                return stream, await call(stream, self._me, self.other, purpose, self._terms, self._credentials)
        except BaseException as error:
            if stream is not None:
                stream.writer.transport.abort()
                await close_stream(stream)
            if isinstance(error, TimeoutError):
                raise PeerLost(f"{self.other.node} did not answer within {self._dial_s:g} s") from error
            if isinstance(error, OSError) and not isinstance(error, PeerError):
                raise PeerLost(f"{self.other.node} cannot be reached: {error}") from error
            raise


async def close_stream(stream: Stream) -> None:
    """Let what was written go out, then end; within a deadline."""
    with contextlib.suppress(Exception):
        stream.writer.close()
        async with asyncio.timeout(_CLOSE_S):
            await stream.writer.wait_closed()
            return
    stream.writer.transport.abort()

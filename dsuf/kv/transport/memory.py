"""The protocol of peers without sockets, with faults as planned: for tests. Frames and bytes come late, twice, never,
with a bit turned over, or the connection is cut.

Bytes are read as an adapter reads them: what the giver's blocks hold at that moment, whatever became of the lease.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

from dsuf.errors import PeerLost
from dsuf.kv.blocks import Blocks
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.transport.hello import Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, Ways
from dsuf.kv.transport.server import PeerServer


class Fault(NamedTuple):
    """What happens to a frame, or to the bytes of a read: `copies` of it arrive after `late_s`, the next one as much
    later, with bit number `flip` (modulo its size) turned over; or the connection is `cut` there."""

    late_s: float = 0.0
    copies: int = 1
    flip: int | None = None
    cut: bool = False


Plan = Callable[[Literal["question", "answer", "bytes"], int], Fault]
"""Asked about everything that is sent, with its size in bytes."""

FINE: Fault = Fault()


class MemoryWire:
    """Implements `Wire`; `join` gives it its other end."""

    def __init__(self, kind: Literal["question", "answer"], plan: Plan) -> None:
        self._kind, self._plan = kind, plan
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._other: MemoryWire | None = None
        self._closed = False

    def join(self, other: "MemoryWire") -> None:
        """What one end sends comes out at the other."""
        self._other, other._other = other, self

    def send(self, frame: bytes) -> None:
        """Send a frame as planned; raises `PeerLost`."""
        if self._closed or self._other is None:
            raise PeerLost("the connection is closed")
        fault = self._plan(self._kind, len(frame))
        if fault.cut:
            self.close()
            raise PeerLost("the connection was cut")
        loop = asyncio.get_running_loop()
        for number in range(fault.copies):
            loop.call_later(fault.late_s * (1 + number), self._other.deliver, flip_bit(frame, fault.flip))

    def deliver(self, frame: bytes) -> None:
        """A frame arrives."""
        if not self._closed:
            self._frames.put_nowait(frame)

    async def receive(self) -> bytes:
        """The next frame; raises `PeerLost`."""
        frame = None if self._closed else await self._frames.get()
        if frame is None:
            raise PeerLost("it has hung up")
        return frame

    def close(self) -> None:
        """End both ends."""
        for end in (self, self._other):
            if end is not None and not end._closed:
                end._closed = True
                end._frames.put_nowait(None)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""


class MemoryMover:
    """Implements `Mover` over the blocks of the other node."""

    def __init__(self, blocks: Blocks, plan: Plan) -> None:
        self._blocks, self._plan = blocks, plan
        self._lost = asyncio.Event()

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Copy as planned, one block after the other; raises `PeerLost` where it is cut. One that never ends is to be
        cancelled."""
        for piece, view in zip(pieces, into, strict=True):
            fault = self._plan("bytes", len(view))
            if fault.cut or self._lost.is_set():
                raise PeerLost("the connection was cut")
            if not fault.copies:
                await self._lost.wait()
            for _ in range(fault.copies):
                if fault.late_s:
                    await asyncio.sleep(fault.late_s)
                view[:] = flip_bit(bytes(self._blocks.view(piece.block)[: len(view)]), fault.flip)

    def close(self) -> None:
        """What still reads fails."""
        self._lost.set()


def through_memory(
    server: PeerServer, blocks: Blocks, me: NodeName, terms: Terms, plan: Plan = lambda kind, size_bytes: FINE
) -> Callable[[PeerGiver], Awaitable[Ways]]:
    """Connects a `PeerGiver` of `me` with `server`, whose arena has `blocks`."""

    async def dial(peer: PeerGiver) -> Ways:
        near, far = MemoryWire("question", plan), MemoryWire("answer", plan)
        near.join(far)
        server.welcome(me, far, terms)
        return Ways(near, terms, MemoryMover(blocks, plan))

    return dial


def flip_bit(data: bytes, bit: int | None) -> bytes:
    """`data` with one bit turned over, counted modulo its size."""
    if bit is None or not data:
        return data
    turned = bytearray(data)
    turned[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(turned)

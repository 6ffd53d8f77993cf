"""What every way of moving bytes between arenas offers, whatever carries the control messages."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.transport.queue_pair import QueuePairEnd, RemoteMemory

Connect = Callable[[QueuePairEnd], Awaitable[tuple[QueuePairEnd, RemoteMemory]]]
"""Has the peer make its end of a queue pair; raises `PeerError`."""

Disconnect = Callable[[int], Awaitable[None]]
"""Has the peer destroy its end of the queue pair whose number here is given, if it can be told."""


class NodeName(msgspec.Struct, frozen=True):
    """A node of the fleet in one of its lives: `node` is what it is called, `boot` the random name of its process."""

    node: str
    boot: str


class Mover(Protocol):
    """Reads blocks of one peer's arena."""

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Fill each buffer of `into` with the beginning of the block at its place; `pieces` are some of those of
        `offer`. Raises `PeerError`.

        However it ends, when it has ended nothing writes into the buffers any more: a call that is cancelled ends only
        then. It waits without end where the peer does: the caller sets the deadline.
        """

    def close(self) -> None:
        """Read nothing any more; calls under way fail."""


class Owner(Protocol):
    """Lets one peer read this node's arena over a fabric. All calls end at once."""

    def accept(self, end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        """Make the end here of the peer's queue pair `end`; raises `PeerError`."""

    def destroy(self, number: int) -> None:
        """Destroy the end here of the peer's queue pair of that number; idempotent."""

    def close(self) -> None:
        """Destroy all: when this returns, the peer reads nothing any more, until it connects again."""


class Fabric(Protocol):
    """A network by which nodes read each other's arenas without asking: RDMA."""

    def describe(self) -> bytes:
        """What a peer has to know to decide whether it can read here: at most 256 bytes, which only a fabric reads."""

    def mover(self, described: bytes, connect: Connect, disconnect: Disconnect) -> Mover | None:
        """What reads from the peer that described itself so; None where that does not go."""

    def owner(self) -> Owner:
        """What lets one more peer read here."""

"""What every way of moving bytes between arenas offers, whatever carries the control messages."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dsuf.kv.handoff import Offer, Piece


class NodeName(msgspec.Struct, frozen=True):
    """A node of the fleet in one of its lives: `node` is what it is called, `boot` 16 random bytes of its process."""

    node: str
    boot: bytes


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

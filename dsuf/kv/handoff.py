"""Handing the cache of a prompt from the node that computes it to the one that goes on: what they tell each other.

A giver offers what it keeps so far, under a lease. The taker reads the blocks, and asks, when it ends the lease,
whether they were good all the time. Bytes alone prove nothing: whoever reads memory without asking may read what took
its place. So what was read counts if the lease held, the tokens are the prompt's, and every checksum is right. Anything
else is a miss, and the turn computes what is missing.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dsuf.errors import CheckpointError
from dsuf.kv.point import PointHead
from dsuf.kv.trace import ID_BYTES, Trace
from dsuf.types import Extent, Turn


class Piece(msgspec.Struct, frozen=True):
    """A block of the giver's arena, and the generation in which it has what is offered."""

    block: int
    generation: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a giver keeps of a prompt, under the lease `id`: whole pages, and with a `point` the state at its end.

    `extent` has the positions of the pages; `head` (fingerprint, salt, page size), `ids` and, with `point`, its ids say
    for what they stand. `checksums` are those of the pages, `checksum` that of the point's own parts.
    """

    id: int
    head: bytes
    ids: bytes
    extent: Extent
    pages: tuple[Piece, ...]
    checksums: tuple[bytes, ...]
    point: PointHead | None = None
    tail: Piece | None = None
    payload: tuple[Piece, ...] = ()
    checksum: bytes = b""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All blocks, in the order in which an arena fills them."""
        return (*self.pages, *([] if self.tail is None else [self.tail]), *self.payload)


class Giver(Protocol):
    """A node that computes prompts for others, as a taker sees it. Any call may fail, or never come back."""

    async def offer(self, turn: Turn, pages: int) -> Offer | None:
        """What there is of the prompt after its first `pages` pages, as soon as it is more than nothing; None when no
        more is to come. The first call for a turn lets its prompt be computed."""

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Copy blocks, each as far as the buffer at its place goes."""

    async def release(self, offer: Offer) -> bool:
        """End the lease; whether all blocks were as offered until now. Idempotent: a lease that ended is not good."""

    async def leave(self, turn: Turn) -> None:
        """Nobody wants the prompt of `turn` any more. Idempotent."""


def check_offer(offer: Offer, prompt: Trace, pages: int) -> None:
    """Raise `CheckpointError` unless `offer` goes on after the first `pages` pages of `prompt`, and only with them."""
    size, start, stop = prompt.page_tokens, offer.extent.start, offer.extent.stop
    fits = offer.head == prompt.head and start == pages * size and stop - start == len(offer.pages) * size
    fits = fits and len(offer.checksums) == len(offer.pages) and stop <= prompt.length
    fits = fits and offer.ids == prompt.ids[start * ID_BYTES : stop * ID_BYTES]
    if not fits or (offer.point is not None and not _is_of(offer.point, prompt, stop)):
        raise CheckpointError(f"an offer of positions {start} to {stop} that is not of this prompt")


def _is_of(point: PointHead, prompt: Trace, stop: int) -> bool:
    """Whether `point` is a state at the end of `prompt`, whose whole pages end at `stop`."""
    whole = point.length - point.length % prompt.page_tokens
    at_end = point.stateful and point.length == prompt.length and whole == stop
    return at_end and (point.ids, point.spans) == (prompt.ids[point.anchor_tokens * ID_BYTES :], prompt.spans)

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
from dsuf.kv.attach import usable_tokens
from dsuf.kv.point import PointHead
from dsuf.kv.trace import ID_BYTES, Trace, branch_trace, common_after
from dsuf.types import Extent, Span, Turn

WAIT_S = 0.5
"""How long somebody waits for what is about to be kept where nothing else is said: some steps of a slow engine."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A block of the giver's arena, and the generation in which it has what is offered."""

    block: int
    generation: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a giver keeps of a prompt, under the lease `id`: whole pages, and with a `point` the state at its end.

    `extent` has the positions of the pages; `head` (fingerprint, salt, page size), `ids` and, with `point`, its ids say
    for what they stand. `checksums` are those of the pages, `checksum` that of the point's own parts.
    Its lease lasts `ttl_s`: for who takes, from before it asked.
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
    ttl_s: float = 30.0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All blocks, in the order in which an arena fills them."""
        return (*self.pages, *([] if self.tail is None else [self.tail]), *self.payload)


class Giver(Protocol):
    """A node that keeps caches, and computes prompts for others, as a taker sees it. Any call may fail, or never come
    back."""

    async def offer(
        self, turn: Turn, pages: int, compute: bool = True, trace: Trace | None = None, patience_s: float = WAIT_S
    ) -> Offer | None:  # fmt: skip
        """What there is of the prompt after its first `pages` pages, as soon as it is more than nothing; None when no
        more is to come. The first call for a turn lets its prompt be computed; or, unless `compute`, only what is kept
        is offered: up to the commit point that saves the prompt the most, or whole pages where those save more.
        `trace` is that of the prompt, where it is known already. What is not computed but about to be kept is waited
        for, for `patience_s` at most."""

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Copy blocks, each as far as the buffer at its place goes. May be cancelled; however it ends, nothing writes
        into the buffers when it has ended."""

    async def release(self, offer: Offer) -> bool:
        """End the lease; whether all blocks were as offered until now. Idempotent: a lease that ended is not good."""

    async def leave(self, turn: Turn) -> None:
        """Nobody wants the prompt of `turn` any more. Idempotent."""


def check_offer(offer: Offer, prompt: Trace, pages: int) -> Trace:
    """The sequence that `offer` is of: `prompt`, or that of a point which `prompt` can use.

    Raises `CheckpointError` unless it is, and whoever has the first `pages` pages of `prompt` can go on with it.
    """
    size, start, stop = prompt.page_tokens, offer.extent.start, offer.extent.stop
    trace = prompt if offer.point is None else _follow_point(offer.point, prompt)
    fits = trace is not None and offer.head == prompt.head and stop - start == len(offer.pages) * size
    fits = fits and len(offer.checksums) == len(offer.pages) and start % size == 0 and 0 <= start <= pages * size
    if not fits or trace is None or not _continues(offer, trace, prompt):
        raise CheckpointError(f"an offer of positions {start} to {stop} that is not of this prompt")
    return trace


def _continues(offer: Offer, trace: Trace, prompt: Trace) -> bool:
    """Whether the pages of `offer` are those of `trace`, and what stands before them is in `prompt` too."""
    start, stop = offer.extent.start, offer.extent.stop
    if stop > trace.length or offer.ids != trace.ids[start * ID_BYTES : stop * ID_BYTES]:
        return False
    # Pages depend on all that stands before them, and on pictures: the giver may have misheard what it was asked for.
    if offer.extent.key != trace.chain[stop // trace.page_tokens]:
        return False
    if offer.point is None:
        return True
    whole, begun = divmod(offer.point.length, prompt.page_tokens)
    shares = trace.chain[: start // prompt.page_tokens + 1] == prompt.chain[: start // prompt.page_tokens + 1]
    return shares and whole * prompt.page_tokens == stop and (offer.tail is not None) == (begun > 0)


def _follow_point(point: PointHead, prompt: Trace) -> Trace | None:
    """The sequence at whose end `point` is; None where `prompt` has no use of it, or it makes no sense."""
    anchor, after = point.anchor_tokens, point.length - point.anchor_tokens
    sound = point.stateful and min(point.spare, point.near) >= 0 and point.payload_bytes >= 0
    sound = sound and 0 <= anchor <= prompt.length and anchor % prompt.page_tokens == 0
    if not sound or after * ID_BYTES != len(point.ids) or _before(anchor, point.spans) != _before(anchor, prompt.spans):
        return None
    trace = branch_trace(prompt, anchor // prompt.page_tokens, point.ids, point.spans)
    common = common_after(anchor, point.ids, trace.spans, prompt)
    usable = usable_tokens(point.length, point.off_tokens, point.repeats, common=common, prompt=prompt.length)
    return trace if usable > 0 and trace.spans == point.spans else None


def _before(tokens: int, spans: Sequence[Span]) -> list[Span]:
    """Those of `spans` that begin before position `tokens`."""
    return [span for span in spans if span.start < tokens]

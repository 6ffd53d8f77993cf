"""Taking over a prompt from a giver, while it computes it."""

import asyncio
import time
from collections.abc import Sequence

from dsuf.errors import CheckpointError, PeerError
from dsuf.kv.calls import finish_within, see_through, work
from dsuf.kv.claims import Filling, Lease
from dsuf.kv.handoff import Giver, Offer, Piece, check_offer
from dsuf.kv.point import CommitPoint, DamagedCache, PointHead, seal, seal_point
from dsuf.kv.sessions import Sessions
from dsuf.kv.trace import ID_BYTES, Trace, trace_prompt
from dsuf.observe.fleet import PullResult
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.types import Turn

AVOID_MOST_S = 60.0
"""Longest time for which a giver that cannot be reached is left alone."""

PART_BLOCKS = 64
"""Blocks that are verified in one go, while the next ones come."""


class NoRoom(CheckpointError):
    """What is offered has no room here."""


class _Taking:
    """A prompt on its way: its first `pages` pages are here, those after the first `own` came from the giver."""

    def __init__(self, turn: Turn, trace: Trace, compute: bool, pages: int, lease: Lease | None) -> None:
        self.turn, self.trace, self.compute = turn, trace, compute
        self.own = self.pages = pages
        self.lease = lease
        self.kept: CommitPoint | None = None
        self.complete = False


class Taker:
    """Fills the arena of `sessions` from a giver. `deadline_s` is how long it may take for each thing asked of it.

    One that was not reached in time is left alone for `avoid_s` (default: as long), and twice as long after each
    further time, so that not every turn waits for it.
    """

    def __init__(
        self, sessions: Sessions, giver: Giver, metrics: Metrics, *, deadline_s: float, avoid_s: float | None = None
    ) -> None:  # fmt: skip
        self._arena, self._layout = sessions.arena, sessions.layout
        self._giver, self._metrics, self._deadline_s = giver, metrics, deadline_s
        self._leaving: set[asyncio.Future[None]] = set()
        self._first_avoid_s = self._avoid_s = deadline_s if avoid_s is None else avoid_s
        self._avoid_until_s = 0.0

    @property
    def avoids(self) -> bool:
        """Whether the giver is left alone now."""
        return asyncio.get_running_loop().time() < self._avoid_until_s

    async def take(self, turn: Turn, compute: bool = True, budget_s: float | None = None) -> int | None:
        """Take over the prompt of `turn` as it is computed, or what is kept of it, within `budget_s` in all; the
        position from which on it came from there.

        None if nothing came, or nothing was asked for, since no more than a page is missing here, or the giver is left
        alone. A failure ends it: what came before stays, the rest is to be computed here.
        """
        if self.avoids:
            return None
        trace = await work(len(turn.prompt.ids) * ID_BYTES, trace_prompt, self._layout, turn.prompt)
        match = self._arena.find(self._arena.tree.walk(trace), trace)
        if match is not None and trace.length - match.length <= self._layout.page_tokens:
            return None
        taking = self._begin(turn, trace, compute)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(budget_s):
                while not taking.complete and await self._take_next(taking):
                    pass
            result: PullResult = "missed" if taking.kept is None else "whole"
        except Exception as error:
            result = self._fail(taking, error)
        finally:
            self._end(taking)
        return self._conclude(taking, result, time.monotonic() - began_s)

    def _fail(self, taking: _Taking, error: Exception) -> PullResult:
        """Taking over ended early, because of `error`."""
        self._metrics.count_handoff("failed")
        # What peers and networks do is told in a line; a traceback is for what nobody expects.
        expected = isinstance(error, TimeoutError | OSError | PeerError | CheckpointError)
        log_event(
            "hand-off failed", level="warning", error=None if expected else error, turn=taking.turn.id,
            pages=taking.pages, reason=str(error) or type(error).__name__,
        )  # fmt: skip
        if isinstance(error, TimeoutError | OSError):
            self._avoid()
        return "late" if isinstance(error, TimeoutError) else "refused" if isinstance(error, NoRoom) else "failed"

    def _conclude(self, taking: _Taking, result: PullResult, seconds: float) -> int | None:
        """Count what came; the position from which on it did."""
        start, tokens = None, 0
        if taking.kept is not None:
            start = taking.own * self._layout.page_tokens
            tokens = max(0, min(taking.kept.head.length, taking.trace.length) - start)
            self._metrics.count_handoff("taken", tokens)
        self._metrics.fleet.count_pull(result, tokens, seconds)
        return start

    def _avoid(self) -> None:
        """Leave the giver alone for a time."""
        self._avoid_until_s = asyncio.get_running_loop().time() + min(self._avoid_s, AVOID_MOST_S)
        self._avoid_s = min(2 * self._avoid_s, AVOID_MOST_S)

    def _begin(self, turn: Turn, trace: Trace, compute: bool) -> _Taking:
        """Keep what is here of the prompt already."""
        path = self._arena.tree.walk(trace)
        page = next((node.host for node in reversed(path) if node.host is not None), None)
        if page is None:
            return _Taking(turn, trace, compute, 0, None)
        return _Taking(turn, trace, compute, page.node.pages, self._arena.lease(page))

    def _end(self, taking: _Taking) -> None:
        """Nothing more is taken; nobody waits until the giver knows."""
        if taking.lease is not None:
            self._arena.release(taking.lease)
        leaving = asyncio.ensure_future(self._leave(taking.turn))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, turn: Turn) -> None:
        """Tell the giver that nothing more is wanted."""
        try:
            await finish_within(self._giver.leave(turn), self._deadline_s)
        except Exception as error:
            log_event("hand-off not ended", level="warning", reason=str(error) or type(error).__name__, turn=turn.id)

    async def _take_next(self, taking: _Taking) -> bool:
        """Take the next offer; False where none is to come."""
        asked = asyncio.ensure_future(self._giver.offer(taking.turn, taking.pages, taking.compute))
        try:
            offer = await finish_within(asked, self._deadline_s)
        finally:
            asked.cancel()  # or it might be asked after the giver was told that nothing more is wanted
        if offer is None:
            return False
        filling = None
        try:
            trace = check_offer(offer, taking.trace, taking.pages)
            filling = self._reserve(trace, offer)
            await self._read(filling, offer)
            # Of what failed nothing is released here: nobody should wait for it, and leaving ends all leases.
            if not await finish_within(self._giver.release(offer), self._deadline_s):
                raise CheckpointError("the lease ended before everything was read")
            self._publish(taking, filling, offer)
            self._avoid_s = self._first_avoid_s
        except BaseException:
            if filling is not None:
                self._arena.abandon(filling)
            raise
        return True

    def _reserve(self, trace: Trace, offer: Offer) -> Filling:
        """Room for `offer`, which is of `trace`; raises `CheckpointError`."""
        head = _head(offer)
        if self._arena.blocks.blocks_for(head.payload_bytes) != len(offer.payload):
            raise CheckpointError(f"a state of {head.payload_bytes} bytes in {len(offer.payload)} blocks")
        filling = self._arena.reserve(trace, head.length, head.payload_bytes)
        if filling is None:
            raise NoRoom(f"no room for {len(offer.pieces)} blocks of an offer")
        return filling

    async def _read(self, filling: Filling, offer: Offer) -> None:
        """Copy what is not here, and verify it."""
        blocks = self._arena.blocks
        views = [blocks.view(block) for block in filling.blocks[: len(filling.blocks) - len(filling.payload)]]
        views += blocks.pieces(filling.payload, _head(offer).payload_bytes)
        pieces = offer.pieces[len(offer.pieces) - len(views) :]
        filling.writing = asyncio.ensure_future(self._fill(filling, offer, pieces, views))
        try:
            await finish_within(filling.writing, self._deadline_s)
        except BaseException as error:
            filling.writing.cancel()
            if isinstance(error, DamagedCache):
                self._metrics.count_checksum_failure()
            raise

    async def _fill(
        self, filling: Filling, offer: Offer, pieces: Sequence[Piece], views: Sequence[memoryview]
    ) -> None:  # fmt: skip
        """Read part by part, and verify those that are here meanwhile. Ends when nothing touches the views any more."""
        verifying = []
        try:
            for start in range(0, len(views), PART_BLOCKS):
                part = slice(start, start + PART_BLOCKS)
                await self._giver.read(offer, pieces[part], views[part])
                size_bytes = sum(map(len, views[part]))
                verifying.append(asyncio.ensure_future(work(size_bytes, _verify_pages, filling, offer, views, part)))
        finally:
            found = await see_through(asyncio.gather(*verifying, return_exceptions=True))
        for error in filter(None, found):
            raise error
        await work(sum(map(len, views[len(filling.pages) :])), _verify_point, filling, offer, views)

    def _publish(self, taking: _Taking, filling: Filling, offer: Offer) -> None:
        """Let what came be found, and keep it until the rest is here; it replaces what came before it."""
        checksums = offer.checksums[len(offer.checksums) - len(filling.pages) :]
        kept = self._arena.publish(filling, _head(offer), checksums, offer.checksum)
        if kept is None:
            raise CheckpointError("what came before is gone")
        lease = self._arena.lease(kept.page)
        if taking.lease is not None:
            self._arena.release(taking.lease)
        if taking.kept is not None:
            self._arena.withdraw(taking.kept)
        taking.lease, taking.kept, taking.complete = lease, kept, offer.point is not None
        taking.pages = offer.extent.stop // self._layout.page_tokens
        log_event("part taken", level="debug", turn=taking.turn.id, stop=kept.head.length)


def _head(offer: Offer) -> PointHead:
    """The head of what is kept of `offer`."""
    return offer.point or PointHead(length=offer.extent.stop)


def _verify_pages(filling: Filling, offer: Offer, views: Sequence[memoryview], part: slice) -> None:
    """Compare the checksums of pages among a part of the views; raises `DamagedCache`. In a thread."""
    pages = len(filling.pages)
    checksums = offer.checksums[len(offer.checksums) - pages :]
    if any(seal(view) != checksum for view, checksum in zip(views[:pages][part], checksums[part], strict=True)):
        raise DamagedCache("a page from a peer fails its checksum")


def _verify_point(filling: Filling, offer: Offer, views: Sequence[memoryview]) -> None:
    """Compare the checksum of the state; raises `DamagedCache`."""
    pages = len(filling.pages)
    tail = views[pages : pages + (filling.tail is not None)]
    if offer.point is not None and seal_point(offer.point, tail, views[pages + len(tail) :]) != offer.checksum:
        raise DamagedCache("a state from a peer fails its checksum")

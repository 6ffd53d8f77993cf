"""Taking over a prompt from a giver, while it computes it.

Bytes should never wait for anything but bytes. So some reads are always under way, checksums are compared meanwhile,
and the next offer is asked for, and begun to read, before the one before has been proved good and published.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from dsuf.errors import CheckpointError, PeerError
from dsuf.kv.calls import finish_within, see_through, work
from dsuf.kv.claims import Filling, Lease
from dsuf.kv.handoff import WAIT_S, Giver, Offer, Piece, check_offer
from dsuf.kv.point import CommitPoint, DamagedCache, PointHead, seal, seal_point
from dsuf.kv.sessions import Sessions
from dsuf.kv.trace import Trace
from dsuf.observe.fleet import PullResult
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.types import Turn

AVOID_MOST_S = 60.0
"""Longest time for which a giver that cannot be reached is left alone."""

PART_BLOCKS = 64
"""Blocks that are read, then verified, in one go: that takes less than receiving them, and less than waiting for a
thread."""
WAITING_SHARE = 0.8
"""Of the deadline, for a giver that waits for what it is about to keep; then it answers."""
READS_AT_ONCE = 6
"""While one comes, the giver knows already what to send next."""


class NoRoom(CheckpointError):
    """What is offered has no room here."""


class _Part:
    """An offer on its way into `filling`. `half` is set as soon as the second half of it is asked for, or it failed."""

    def __init__(self, offer: Offer, filling: Filling) -> None:
        self.offer, self.filling = offer, filling
        self.half = asyncio.Event()


class _Taking:
    """A prompt on its way: its first `pages` pages are here or on their way, those after the first `own` from the
    giver, which may wait for `patience_s`. `parts` are not published yet; `ending` does so with the first one."""

    def __init__(
        self, turn: Turn, trace: Trace, compute: bool, patience_s: float, pages: int, lease: Lease | None
    ) -> None:  # fmt: skip
        self.turn, self.trace, self.compute, self.patience_s = turn, trace, compute, patience_s
        self.own = self.pages = pages
        self.lease = lease
        self.kept: CommitPoint | None = None
        self.parts: list[_Part] = []
        self.ending: asyncio.Future[None] | None = None


class Taker:
    """Fills the arena of `sessions` from a giver. `deadline_s` is how long it may take for each thing asked of it.

    One that was not reached in time is left alone for `avoid_s` (default: as long), and twice as long after each
    further time, so that not every turn waits for it.
    """

    def __init__(
        self, sessions: Sessions, giver: Giver, metrics: Metrics, *, deadline_s: float, avoid_s: float | None = None
    ) -> None:  # fmt: skip
        self._sessions, self._arena, self._layout = sessions, sessions.arena, sessions.layout
        self._giver, self._metrics, self._deadline_s = giver, metrics, deadline_s
        self._leaving: set[asyncio.Future[None]] = set()
        self._first_avoid_s = self._avoid_s = deadline_s if avoid_s is None else avoid_s
        self._avoid_until_s = 0.0

    @property
    def avoids(self) -> bool:
        """Whether the giver is left alone now."""
        return asyncio.get_running_loop().time() < self._avoid_until_s

    async def take(
        self, turn: Turn, compute: bool = True, budget_s: float | None = None, patience_s: float = WAIT_S
    ) -> int | None:  # fmt: skip
        """Take over the prompt of `turn` as it is computed, or what is kept of it, within `budget_s` in all, of which
        the giver may wait `patience_s` for what it is about to keep; the position from which on it came from there.

        None if nothing came, or nothing was asked for, since no more than a page is missing here, or the giver is left
        alone. A failure ends it: what came before stays, the rest is to be computed here.
        """
        if self.avoids:
            return None
        trace = await self._sessions.trace(turn)
        match = self._arena.find(self._arena.tree.walk(trace), trace)
        if match is not None and trace.length - match.length <= self._layout.page_tokens:
            return None
        taking = self._begin(turn, trace, compute, min(patience_s, WAITING_SHARE * self._deadline_s))
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(budget_s):
                await self._take_all(taking)
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
            self.avoid()
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

    def avoid(self) -> None:
        """Leave the giver alone for a time."""
        self._avoid_until_s = asyncio.get_running_loop().time() + min(self._avoid_s, AVOID_MOST_S)
        self._avoid_s = min(2 * self._avoid_s, AVOID_MOST_S)

    def _begin(self, turn: Turn, trace: Trace, compute: bool, patience_s: float) -> _Taking:
        """Keep what is here of the prompt already."""
        path = self._arena.tree.walk(trace)
        page = next((node.host for node in reversed(path) if node.host is not None), None)
        if page is None:
            return _Taking(turn, trace, compute, patience_s, 0, None)
        return _Taking(turn, trace, compute, patience_s, page.node.pages, self._arena.lease(page))

    def _end(self, taking: _Taking) -> None:
        """Nothing more is taken; nobody waits until the giver knows."""
        if taking.ending is not None:
            taking.ending.cancel()
        for part in reversed(taking.parts):
            if part.filling.writing is not None:
                part.filling.writing.cancel()
            self._arena.abandon(part.filling)
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

    async def _take_all(self, taking: _Taking) -> None:
        """Take one offer after the other, up to one with a point."""
        try:
            offer = None
            while (offer is None or offer.point is None) and (offer := await self._ask(taking)) is not None:
                part = await self._begin_part(taking, offer)
                async with asyncio.timeout(self._deadline_s):
                    await part.half.wait()
                await _follow(taking.ending)
                taking.ending = asyncio.ensure_future(self._end_part(taking, part))
        except Exception:
            await _follow(taking.ending)  # what came before a failure stays
            raise
        await _follow(taking.ending)

    async def _ask(self, taking: _Taking) -> Offer | None:
        """The next offer; None where none is to come. Raises what goes wrong with the one before meanwhile."""
        offer = self._giver.offer(taking.turn, taking.pages, taking.compute, taking.trace, taking.patience_s)
        asked = asyncio.ensure_future(offer)
        waited: set[asyncio.Future[Any]] = {asked} if taking.ending is None else {asked, taking.ending}
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if taking.ending is not None and taking.ending.done():
                    taking.ending.result()
                return await finish_within(asked, self._deadline_s)
        finally:
            asked.cancel()  # or it might be asked after the giver was told that nothing more is wanted

    async def _begin_part(self, taking: _Taking, offer: Offer) -> _Part:
        """Begin to read an offer; raises `CheckpointError` where it is of no use."""
        trace = check_offer(offer, taking.trace, taking.pages)
        after = taking.parts[-1].filling if taking.parts else None
        if after is not None and offer.extent.start != after.stop_page * self._layout.page_tokens:
            await _follow(taking.ending)
            after = None
        part = _Part(offer, self._reserve(trace, offer, after))
        taking.parts.append(part)
        taking.pages = offer.extent.stop // self._layout.page_tokens
        self._read(part)
        return part

    async def _end_part(self, taking: _Taking, part: _Part) -> None:
        """Publish what was read, if it is good. Of what failed nothing is released here: nobody should wait for it, and
        leaving ends all leases."""
        assert part.filling.writing is not None
        try:
            await finish_within(part.filling.writing, self._deadline_s)
        except DamagedCache:
            self._metrics.count_checksum_failure()
            raise
        if not await finish_within(self._giver.release(part.offer), self._deadline_s):
            raise CheckpointError("the lease ended before everything was read")
        self._publish(taking, part)
        self._avoid_s = self._first_avoid_s

    def _reserve(self, trace: Trace, offer: Offer, after: Filling | None) -> Filling:
        """Room for `offer`, which is of `trace`; raises `CheckpointError`."""
        head = _head(offer)
        if self._arena.blocks.blocks_for(head.payload_bytes) != len(offer.payload):
            raise CheckpointError(f"a state of {head.payload_bytes} bytes in {len(offer.payload)} blocks")
        filling = self._arena.reserve(trace, head.length, head.payload_bytes, after)
        if filling is None:
            raise NoRoom(f"no room for {len(offer.pieces)} blocks of an offer")
        return filling

    def _read(self, part: _Part) -> None:
        """Copy what is not here, and verify it."""
        blocks, filling, offer = self._arena.blocks, part.filling, part.offer
        views = [blocks.view(block) for block in filling.blocks[: len(filling.blocks) - len(filling.payload)]]
        views += blocks.pieces(filling.payload, _head(offer).payload_bytes)
        pieces = offer.pieces[len(offer.pieces) - len(views) :]
        filling.writing = asyncio.ensure_future(self._fill(part, pieces, views))
        filling.writing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _fill(self, part: _Part, pieces: Sequence[Piece], views: Sequence[memoryview]) -> None:
        """Read some slices at a time, and verify each. Ends when nothing touches the views any more."""
        slices = iter([slice(start, start + PART_BLOCKS) for start in range(0, len(views), PART_BLOCKS)])

        async def read_on() -> None:
            for some in slices:
                if 2 * some.stop >= len(views):
                    part.half.set()
                await self._giver.read(part.offer, pieces[some], views[some])
                _verify_pages(part, views, some)

        reading: list[asyncio.Future[None]] = [asyncio.ensure_future(read_on()) for _ in range(READS_AT_ONCE)]
        try:
            await asyncio.wait(reading, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in reading:
                task.cancel()
            part.half.set()
            found = await see_through(asyncio.gather(*reading, return_exceptions=True))
        for error in sorted(filter(None, found), key=lambda error: isinstance(error, asyncio.CancelledError)):
            raise error
        await work(sum(map(len, views[len(part.filling.pages) :])), _verify_point, part, views)

    def _publish(self, taking: _Taking, part: _Part) -> None:
        """Let what came be found, and keep it until the rest is here; it replaces what came before it."""
        offer, filling = part.offer, part.filling
        checksums = offer.checksums[len(offer.checksums) - len(filling.pages) :]
        kept = self._arena.publish(filling, _head(offer), checksums, offer.checksum)
        if kept is None:
            raise CheckpointError("what came before is gone")
        taking.parts.remove(part)
        lease = self._arena.lease(kept.page)
        if taking.lease is not None:
            self._arena.release(taking.lease)
        if taking.kept is not None:
            self._arena.withdraw(taking.kept)
        taking.lease, taking.kept = lease, kept
        log_event("part taken", level="debug", turn=taking.turn.id, stop=kept.head.length)


async def _follow(ending: asyncio.Future[None] | None) -> None:
    """Wait for it, if there is any; raises what it does."""
    if ending is not None:
        await ending


def _head(offer: Offer) -> PointHead:
    """The head of what is kept of `offer`."""
    return offer.point or PointHead(length=offer.extent.stop)


def _verify_pages(part: _Part, views: Sequence[memoryview], some: slice) -> None:
    """Compare the checksums of pages among some of the views; raises `DamagedCache`."""
    pages = len(part.filling.pages)
    checksums = part.offer.checksums[len(part.offer.checksums) - pages :]
    if any(seal(view) != checksum for view, checksum in zip(views[:pages][some], checksums[some], strict=True)):
        raise DamagedCache("a page from a peer fails its checksum")


def _verify_point(part: _Part, views: Sequence[memoryview]) -> None:
    """Compare the checksum of the state; raises `DamagedCache`."""
    pages, offer = len(part.filling.pages), part.offer
    tail = views[pages : pages + (part.filling.tail is not None)]
    if offer.point is not None and seal_point(offer.point, tail, views[pages + len(tail) :]) != offer.checksum:
        raise DamagedCache("a state from a peer fails its checksum")

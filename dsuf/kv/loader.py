"""Copying in: what was chosen for a turn goes from the arena to the engine, verified on the way."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from dsuf.errors import CheckpointError
from dsuf.kv.arena import Arena
from dsuf.kv.blocks import SLICE
from dsuf.kv.calls import finish_within, when_ended, work
from dsuf.kv.claims import Lease
from dsuf.kv.holding import Holding
from dsuf.kv.pages import PagePool
from dsuf.kv.point import CommitPoint, DamagedCache, HostPage, seal, seal_point
from dsuf.kv.trace import ID_BYTES, Trace
from dsuf.types import Engine, SessionState


class _Copy(NamedTuple):
    """A page of the device, and the block that fills it: of a whole page, or of the begun one."""

    page: int
    kept: HostPage | None
    block: int


class Loader:
    """Fills the pages of turns and lets them go on. `on_room` runs when pages came free that were still written."""

    def __init__(self, engine: Engine, arena: Arena, pool: PagePool, on_room: Callable[[], None]) -> None:
        self._engine, self._arena, self._pool, self._on_room = engine, arena, pool, on_room

    async def load(self, holding: Holding, deadline_s: float) -> None:
        """Let the turn of `holding` take over what its choice says; its lease is returned.

        Raises `DamagedCache`, `CheckpointError` or what the engine raises, all of them with the turn as it was but for
        rows in its own pages; or `TimeoutError`. Pages that are still written then are held until that has ended.
        """
        lease, holding.lease = holding.lease, None
        copies = self._list_copies(holding, lease)
        writing: asyncio.Future[None] | None = None
        pages: list[int] = []
        try:
            state = await self._read_state(holding, lease)
            for first in range(0, len(copies), SLICE):
                part = copies[first : first + SLICE]
                rows = [self._arena.blocks.view(copy.block) for copy in part]
                await work(sum(map(len, rows)), _verify, part, rows)
                pages = [copy.page for copy in part]
                writing = asyncio.ensure_future(self._engine.write_pages(pages, rows))
                await finish_within(writing, deadline_s)
        finally:
            if writing is not None and not writing.done():
                self._pool.retain(pages)
                when_ended(writing, partial(self._release, pages))
            if lease is not None:
                when_ended(writing, partial(self._arena.release, lease))
        resumed = self._engine.resume(holding.turn.id, holding.choice.length, state)
        start = await finish_within(resumed, deadline_s)
        if start != holding.choice.start:
            raise CheckpointError(f"resumed at {start} instead of {holding.choice.start}")

    def _release(self, pages: Sequence[int]) -> None:
        """Nobody writes `pages` any more whose turn may be gone."""
        self._pool.release(pages)
        self._on_room()

    def _list_copies(self, holding: Holding, lease: Lease | None) -> list[_Copy]:
        """The pages to fill, whose rows are not there, and what fills them."""
        if lease is None:
            return []
        size, chain = self._engine.layout.page_tokens, {}
        if lease.page is not None:
            chain = {page.node.pages - 1: page for page in lease.page.chain()}
        found = []
        for extent in holding.choice.extents:
            if extent.source in ("host", "peer"):
                pages = range(extent.start // size, -(-extent.stop // size))
                found += [_find_copy(holding.pages[page], chain.get(page), lease.point) for page in pages]
        return found

    async def _read_state(self, holding: Holding, lease: Lease | None) -> SessionState | None:
        """The state to go on from, verified; None where a window is replayed."""
        if lease is None or lease.point is None or holding.trace is None:
            return None
        return await work(lease.point.head.payload_bytes, self._state, lease.point, holding.trace)

    def _state(self, point: CommitPoint, trace: Trace) -> SessionState:
        """The state that `point` keeps, verified, for a prompt that shares its first positions."""
        head, blocks = point.head, self._arena.blocks
        tail = [] if point.tail is None else [blocks.view(point.tail)]
        payload = blocks.pieces(point.blocks, head.payload_bytes)
        if seal_point(head, tail, payload) != point.checksum:
            raise DamagedCache(f"a commit point at {head.length} fails its checksum")
        return SessionState(
            fingerprint=self._engine.layout.fingerprint, length=head.length,
            ids=trace.ids[: head.anchor_tokens * ID_BYTES] + head.ids, payload=b"".join(payload), spare=head.spare,
            near=head.near, repeats=head.repeats,
        )  # fmt: skip


def _find_copy(page: int, kept: HostPage | None, point: CommitPoint | None) -> _Copy:
    """What fills the device's `page`: a whole page that is kept, or the begun one of `point`."""
    if kept is not None:
        return _Copy(page, kept, kept.block)
    if point is None or point.tail is None:
        raise CheckpointError("a page has no copy")
    return _Copy(page, None, point.tail)


def _verify(copies: Sequence[_Copy], rows: Sequence[memoryview]) -> None:
    """Compare the checksums of whole pages; that of a begun one is its commit point's. In a thread."""
    for copy, row in zip(copies, rows, strict=True):
        if copy.kept is not None and seal(row) != copy.kept.checksum:
            raise DamagedCache("a kept page fails its checksum", copy.kept)

"""Copying in: what was chosen for a turn goes from the arena to the engine, verified on the way."""

import asyncio
from collections.abc import Sequence

from dsuf.errors import CheckpointError
from dsuf.kv.arena import Arena, Lease
from dsuf.kv.calls import finish_within
from dsuf.kv.holding import Holding
from dsuf.kv.point import CommitPoint, DamagedCache, HostPage, seal, seal_point
from dsuf.kv.trace import ID_BYTES, Trace
from dsuf.types import Engine, SessionState


class Loader:
    """Fills the pages of turns and lets them go on."""

    def __init__(self, engine: Engine, arena: Arena) -> None:
        self._engine, self._arena = engine, arena

    async def load(self, holding: Holding, deadline_s: float) -> None:
        """Let the turn of `holding` take over what its choice says; its lease is returned.

        Raises `DamagedCache` before anything was changed; `CheckpointError`, `TimeoutError` or what the engine raises.
        """
        lease, holding.lease = holding.lease, None
        begun = False

        def give_back() -> None:
            if lease is not None:
                self._arena.release(lease)

        try:
            targets, rows, state = await self._prepare(holding, lease)
            if targets:
                begun = True
                await finish_within(self._engine.write_pages(targets, rows), deadline_s, give_back)
            start = await finish_within(
                self._engine.resume(holding.turn.id, holding.choice.length, state), deadline_s
            )  # fmt: skip
        finally:
            if not begun:
                give_back()
        if start != holding.choice.start:
            raise CheckpointError(f"resumed at {start} instead of {holding.choice.start}")

    async def _prepare(
        self, holding: Holding, lease: Lease | None
    ) -> tuple[list[int], list[memoryview], SessionState | None]:
        """Pages to write, their rows, and the state, verified."""
        pages, copies, blocks = self._list_copies(holding, lease)
        rows = [self._arena.blocks.view(block) for block in blocks]
        point = None if holding.choice.point is None or lease is None else lease.point
        assert holding.trace is not None
        state = await asyncio.to_thread(self._verify, copies, rows, point, holding.trace)
        return pages, rows, state

    def _list_copies(self, holding: Holding, lease: Lease | None) -> tuple[list[int], list[HostPage | None], list[int]]:
        """The pages to fill, whose rows are not there, and what fills each: a host page or the begun one's block."""
        size, choice = self._engine.layout.page_tokens, holding.choice
        chain = (
            {} if lease is None or lease.page is None else {copy.node.pages - 1: copy for copy in lease.page.chain()}
        )
        found: list[tuple[int, HostPage | None, int]] = []
        for extent in choice.extents:
            if extent.source in ("host", "peer"):
                pages = range(extent.start // size, -(-extent.stop // size))
                found += [self._copy_of(page, chain.get(page), lease) for page in pages]
        return [holding.pages[n] for n, _, _ in found], [copy for _, copy, _ in found], [block for _, _, block in found]

    def _copy_of(self, page: int, copy: HostPage | None, lease: Lease | None) -> tuple[int, HostPage | None, int]:
        """Page number `page` of a prompt with what fills it."""
        if copy is not None:
            return page, copy, copy.block
        point = None if lease is None else lease.point
        if point is None or point.tail is None:
            raise CheckpointError(f"no copy of page {page}")
        return page, None, point.tail

    def _verify(
        self, copies: Sequence[HostPage | None], rows: Sequence[memoryview], point: CommitPoint | None, trace: Trace
    ) -> SessionState | None:
        """The state of `point`, after comparing all checksums; in a thread."""
        for copy, row in zip(copies, rows, strict=True):
            if copy is not None and seal(row) != copy.checksum:
                raise DamagedCache("a kept page fails its checksum", copy)
        return None if point is None else self._state(point, trace)

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
            repeats=head.repeats,
        )  # fmt: skip

"""Copying out: what a turn has computed goes from the engine to the arena; it is written, then published."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import SLICE
from dsuf.kv.calls import finish_within, work
from dsuf.kv.claims import Filling, Lease
from dsuf.kv.holding import Holding
from dsuf.kv.pages import PagePool
from dsuf.kv.point import CommitPoint, PointHead, make_head, seal, seal_point
from dsuf.kv.trace import Trace, follow_trace, goes_on
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.types import Engine, SessionState

Step = asyncio.Future[Any]
"""The step whose end is a commit point, as it was launched."""


class Copy:
    """A commit point on its way: about the first `length` positions of a turn, whose pages it holds meanwhile."""

    def __init__(self, holding: Holding, length: int, step: Step | None) -> None:
        assert holding.trace is not None
        self.holding, self.trace, self.length, self.step = holding, holding.trace, length, step
        self.state: SessionState | None = None
        self.before = holding.latest
        self.tasks = 0
        self.stale = False
        self.point: CommitPoint | None = None  # what came of it
        self.ended = asyncio.Event()
        holding.latest = self


class Keeper:
    """Makes commit points, those of a turn one by one, as each stands on the one before. No failure reaches a turn.

    `on_room` runs when pages came free. `kept` is set, and replaced by a new event, whenever something was published.
    """

    def __init__(
        self, engine: Engine, arena: Arena, pool: PagePool, metrics: Metrics, deadline_s: float,
        on_room: Callable[[], None],
    ) -> None:  # fmt: skip
        self._engine, self._arena, self._pool = engine, arena, pool
        self._metrics, self._deadline_s, self._on_room = metrics, deadline_s, on_room
        self.kept = asyncio.Event()
        self._under_way: set[Copy] = set()

    @property
    def under_way(self) -> int:
        """Commit points on their way."""
        return len(self._under_way)

    def commit(self, holding: Holding, length: int, step: Step | None) -> asyncio.Task[None]:
        """Keep the state and what it stands on; the task ends when the state has left the engine.

        The engine is asked here and now: its calls take effect in the order in which they are made.
        """
        reading = asyncio.ensure_future(self._engine.read_state(holding.turn.id))
        return self._start(partial(self._read, reading), Copy(holding, length, step))

    def commit_pages(self, holding: Holding, length: int) -> asyncio.Task[None]:
        """Keep the whole pages within the first `length` positions of the prompt; the task ends when they are kept."""
        return self._start(self._keep, Copy(holding, length, None))

    async def wait_for(self, prompt: Trace, seconds: float) -> None:
        """Wait, for so long at most, for what the turn that `prompt` goes on from is leaving behind now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for copy in [copy for copy in self._under_way if goes_on(prompt, copy.trace)]:
                    await copy.ended.wait()

    async def drain(self) -> None:
        """Wait, within the deadline, for all that is on its way."""
        try:
            async with asyncio.timeout(self._deadline_s):
                while self._under_way:
                    await next(iter(self._under_way)).ended.wait()
        except TimeoutError:
            log_event("session caches not kept in time", level="warning", copies=len(self._under_way))

    def drop(self) -> None:
        """Publish nothing of what is on its way now."""
        for copy in self._under_way:
            copy.stale = True

    def _start(self, work: Callable[[Copy], Coroutine[Any, Any, None]], copy: Copy) -> asyncio.Task[None]:
        """Begin `work`, at whose end the pages are given back."""
        self._pool.retain(copy.holding.pages)
        if copy not in self._under_way:
            self._under_way.add(copy)
            self._arena.expect(copy.trace)
        copy.tasks += 1
        task = asyncio.create_task(work(copy))
        task.add_done_callback(lambda _: self._end(copy))
        return task

    def _end(self, copy: Copy) -> None:
        """One of the tasks of `copy` is done, or was cancelled even before it began."""
        copy.tasks -= 1
        if not copy.tasks:
            self._under_way.discard(copy)
            self._arena.expect_no_more(copy.trace)
            copy.ended.set()
        self._pool.release(copy.holding.pages)
        self._on_room()

    async def _read(self, reading: asyncio.Future[SessionState | None], copy: Copy) -> None:
        """Wait for the state, and let it be kept when it is there."""
        try:
            copy.state = await finish_within(reading, self._deadline_s)
        except Exception as error:
            self._fail(copy, error)
        if copy.state is not None and copy.state.length:
            self._start(self._keep, copy)

    async def _keep(self, copy: Copy) -> None:
        """Keep what `copy` stands for, unless it is kept already or its step failed."""
        before, copy.before = copy.before, None
        try:
            if before is not None:
                await before.ended.wait()
            if await self._is_good(copy):
                await self._copy_out(copy)
        except Exception as error:
            self._fail(copy, error)

    async def _is_good(self, copy: Copy) -> bool:
        """Whether the step behind `copy`, and the turn so far, came to a good end."""
        if copy.step is not None:
            await asyncio.wait({copy.step}, timeout=self._deadline_s)
            if not copy.step.done() or copy.step.cancelled() or copy.step.exception() is not None:
                return False
        return not copy.holding.failed

    async def _copy_out(self, copy: Copy) -> None:
        """Make room, write, publish."""
        trace, head = await work(len(copy.state.ids if copy.state is not None else b""), _describe, copy)
        if copy.holding.failed or copy.stale:
            return
        if head.stateful:
            self._name(copy, trace)
            if self._is_known(copy, trace, head):
                return
        if not self._arena.has_room(trace, head.length, head.payload_bytes):
            self._metrics.count_commit("refused")
            return
        lease: Lease | None = None
        try:
            while (pages := self._arena.kept_pages(trace) + SLICE) < head.length // trace.page_tokens:
                kept = await self._copy_part(copy, trace, PointHead(length=pages * trace.page_tokens))
                if kept is None:
                    return
                before, lease = lease, self._arena.lease(kept.page)
                if before is not None:
                    self._arena.release(before)
            if (kept := await self._copy_part(copy, trace, head)) is not None:
                copy.point = kept
                self._metrics.count_commit("kept")
        finally:
            if lease is not None:
                self._arena.release(lease)

    async def _copy_part(self, copy: Copy, trace: Trace, head: PointHead) -> CommitPoint | None:
        """Keep `head` and the pages that it stands on; None if that came to nothing."""
        evicted = self._arena.evicted
        filling = self._arena.reserve(trace, head.length, head.payload_bytes)
        self._metrics.count_evictions(self._arena.evicted - evicted)
        if filling is None:
            self._metrics.count_commit("refused")
            return None
        if not filling.blocks and not head.stateful:  # all of these pages are kept already
            self._arena.abandon(filling)
            return None
        try:
            checksums, checksum = await self._write(filling, copy, head)
            return self._publish(filling, copy, head, checksums, checksum)
        except BaseException:
            self._arena.abandon(filling)
            raise

    def _publish(
        self, filling: Filling, copy: Copy, head: PointHead, checksums: list[bytes], checksum: bytes
    ) -> CommitPoint | None:  # fmt: skip
        """Let what was written be found, unless the turn failed meanwhile; pages without a state give way to it."""
        holding = copy.holding
        if holding.failed or copy.stale or (head.stateful and self._is_known(copy, filling.trace, head)):
            self._arena.abandon(filling)
            return None
        kept = self._arena.publish(filling, head, checksums, checksum)
        if kept is None:
            return None
        self.kept.set()
        self.kept = asyncio.Event()
        if holding.run is not None:
            self._arena.withdraw(holding.run)
        holding.run = None if head.stateful else kept
        if not holding.trusted:
            holding.made.append(kept)
        return kept

    def _is_known(self, copy: Copy, trace: Trace, head: PointHead) -> bool:
        """Whether such a commit point is kept already, which is a use of it."""
        copy.point = self._arena.find_exact(trace, head.length)
        if copy.point is not None:
            self._arena.credit(copy.point)
        return copy.point is not None

    def _name(self, copy: Copy, trace: Trace) -> None:
        """Let the pages of a turn be found on the device, those with generated tokens too."""
        path = self._arena.tree.walk(trace) or [self._arena.tree.root(trace)]
        path += self._arena.tree.follow(path[-1], trace, trace.length // trace.page_tokens)
        for page, node in zip(copy.holding.pages, path[1:], strict=False):
            self._pool.name(page, node)
        self._arena.tree.prune(path[-1])

    async def _write(self, filling: Filling, copy: Copy, head: PointHead) -> tuple[list[bytes], bytes]:
        """Fill the blocks of `filling`; the checksums of its pages, and the commit point's."""
        blocks = [*filling.pages, *([] if filling.tail is None else [filling.tail])]
        pages = copy.holding.pages[filling.first_page : filling.first_page + len(blocks)]
        views = [self._arena.blocks.view(block) for block in blocks]
        if blocks:
            filling.writing = asyncio.ensure_future(self._engine.read_pages(pages, views))
            await finish_within(filling.writing, self._deadline_s)
        size_bytes = len(filling.blocks) * self._arena.blocks.block_bytes
        state = copy.state.payload if copy.state is not None and head.stateful else b""
        sealing = asyncio.ensure_future(work(size_bytes, self._seal, filling, head, state))
        filling.writing = sealing
        return await finish_within(sealing, self._deadline_s)

    def _seal(self, filling: Filling, head: PointHead, state: bytes) -> tuple[list[bytes], bytes]:
        """Write the state and take all checksums; in a thread."""
        blocks = self._arena.blocks
        payload = blocks.pieces(filling.payload, head.payload_bytes)
        start = 0
        for piece in payload:
            piece[:] = state[start : start + len(piece)]
            start += len(piece)
        tail = [] if filling.tail is None else [blocks.view(filling.tail)]
        return [seal(blocks.view(block)) for block in filling.pages], seal_point(head, tail, payload)

    def _fail(self, copy: Copy, error: Exception) -> None:
        """Something went wrong, or took too long, as behind a long step; the turn goes on without."""
        if isinstance(error, TimeoutError):
            self._metrics.count_commit("late")
            log_event("session cache late", what="export", turn=copy.holding.turn.id)
            return
        self._metrics.count_commit("failed")
        log_event("session cache failed", level="warning", error=error, what="export", turn=copy.holding.turn.id)


def _describe(copy: Copy) -> tuple[Trace, PointHead]:
    """The tokens of what is kept, and its head; in a thread."""
    prompt, state = copy.trace, copy.state
    if state is None:
        return prompt, PointHead(length=copy.length - copy.length % prompt.page_tokens)
    trace = follow_trace(prompt, state.ids, copy.holding.turn.prompt.spans)
    return trace, make_head(trace, state)

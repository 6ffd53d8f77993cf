"""Session caches over the toy engine, and turns that go through them by hand, without a scheduler."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.claims import Filling
from dsuf.kv.commit import is_due
from dsuf.kv.point import CommitPoint, make_head, seal, seal_point
from dsuf.kv.sessions import Restored, Sessions
from dsuf.kv.trace import Trace, make_trace
from dsuf.observe.metrics import Metrics
from dsuf.types import CacheLayout, PrefillRange, SessionState, Span, StepPlan, StepResult, Turn
from tests.toy import ToyEngine


class Done(NamedTuple):
    """A turn that went through: what it took over, its tokens, and those of its prompt and reply together."""

    restored: Restored
    ids: list[int]
    conversation: tuple[int, ...]


class Rig:
    """Sessions over a toy engine with an arena of `blocks` blocks."""

    def __init__(self, *, blocks: int = 200, deadline_s: float = 5.0, **engine: Any) -> None:
        self.engine = ToyEngine(**engine)
        self.metrics = Metrics("test")
        self.arena = make_arena(self.engine, blocks)
        self.sessions = Sessions(self.engine, self.arena, self.metrics, deadline_s=deadline_s)

    async def run(self, turn: Turn, *, chunk: int = 16, drafts: int = 0) -> Done:
        """Take `turn` from its admission to its release; what it leaves behind is kept when this returns."""
        restored = await self.begin(turn)
        ids = await self.compute(turn, restored.start, chunk=chunk, drafts=drafts)
        await self.end(turn)
        await self.settle()
        assert self.engine.violations == []
        return Done(restored, ids, (*turn.prompt.ids, *ids))

    async def begin(self, turn: Turn) -> Restored:
        """Admit, attach, restore; again where it has to be."""
        while True:
            pages = await self.sessions.admit(turn)
            assert pages is not None, "no room"
            self.engine.attach(turn, pages)
            restored = await self.sessions.restore(turn)
            if restored is not None:
                assert restored.device_tokens + restored.host_tokens + restored.peer_tokens == restored.start
                assert restored.start < len(turn.prompt.ids)
                return restored
            self.engine.detach(turn.id)
            self.sessions.release(turn.id)

    async def compute(self, turn: Turn, start: int, *, chunk: int = 16, drafts: int = 0) -> list[int]:
        """Prefill from `start` and decode, committing what is due; the tokens."""
        length, kept, ids = len(turn.prompt.ids), start, list[int]()
        for first in range(start, length, chunk):
            stop = min(first + chunk, length)
            step = asyncio.ensure_future(self.engine.step(self.plan(turn, first, stop)))
            exact = not self.engine.layout.replay_tokens
            if is_due(stop, prompt=length, kept=kept, chunk_tokens=chunk, exact=exact):
                kept = stop
                self.sessions.commit(turn, stop, step)
            [result] = await self.step(turn, step)
            ids += result.ids
            self.sessions.advance(turn.id, stop)
        self.sessions.trust(turn.id)
        while result.finish is None:
            step = asyncio.ensure_future(self.engine.step(StepPlan(decode=(turn.id,), drafts=drafts)))
            [result] = await self.step(turn, step)
            ids += result.ids
        return ids

    def plan(self, turn: Turn, start: int, stop: int) -> StepPlan:
        """A plan that prefills a part of the prompt of `turn`."""
        return StepPlan(prefill=(PrefillRange(turn.id, start, stop),))

    async def step(self, turn: Turn, step: "asyncio.Future[list[StepResult]]") -> list[StepResult]:
        """The results of a step; what it fails behind is blamed."""
        try:
            return await step
        except Exception:
            self.sessions.blame(turn.id)
            self.engine.detach(turn.id)
            self.sessions.release(turn.id)
            raise

    async def end(self, turn: Turn) -> None:
        """Commit, detach, release."""
        await self.sessions.commit(turn, len(turn.prompt.ids) + turn.sampling.max_tokens)
        self.engine.detach(turn.id)
        self.sessions.release(turn.id)

    async def settle(self) -> None:
        """Wait until nothing is on its way."""
        while self.sessions.counters()["copies"]:
            await self.sessions.settle()

    def check_idle(self) -> None:
        """Nothing is in use, and no page, block or node is lost."""
        counters = self.sessions.counters()
        in_use = {name: counters[name] for name in ("leases", "filling", "dying", "turns", "copies", "pages_held")}
        assert set(in_use.values()) == {0}, in_use
        check_books(self.sessions)

    async def close(self) -> None:
        """Everything comes back."""
        self.check_idle()
        await self.sessions.close()
        assert set(self.sessions.counters().values()) == {0}
        assert list(self.arena.tree.nodes()) == []
        assert self.sessions.pool.room == self.engine.layout.pages
        assert self.arena.blocks.free == self.arena.blocks.count
        assert self.engine.violations == []

    def count(self, name: str) -> float:
        """A sample of the metrics, by its line's beginning."""
        lines = self.metrics.render().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"dsuf_session_cache_{name}"))


def make_arena(engine: ToyEngine, blocks: int) -> Arena:
    """An arena of so many blocks."""
    size = engine.layout.page_bytes
    return Arena(Blocks(size, map_memory(blocks * size)))


def check_books(sessions: Sessions) -> None:
    """Every page and block is in one place, and the counts of who uses them are right."""
    check_pool(sessions)
    check_arena(sessions.arena)


def check_pool(sessions: Sessions) -> None:
    """Device pages: free, held or cached, each of them once."""
    pool = sessions.pool
    held = {page for page, references in enumerate(pool._references) if references}
    assert all(references >= 0 for references in pool._references)
    assert sorted([*pool._free, *pool._cached, *held]) == list(range(pool.pages))
    assert set(pool._cached) <= set(pool._named)
    assert {node.device for node in sessions.arena.tree.nodes() if node.device is not None} <= set(pool._named)
    assert all(node.device == page for page, node in pool._named.items())


def check_arena(arena: Arena) -> None:
    """Blocks: free or in one entry; pages stand as long as something stands on them."""
    pages = {page for node in arena.tree.nodes() if (page := node.host) is not None}
    for top in [*(point.page for point in arena._points), *(lease.page for lease in arena._leases)]:
        pages |= set(top.chain()) if top is not None else set()
    for filling in arena._fillings:
        pages |= set(filling.base.chain()) if filling.base is not None else set()
    used = [page.block for page in pages]
    used += [block for filling in arena._fillings for block in filling.blocks]
    for point in arena._points:
        used += [*point.blocks, *([] if point.tail is None else [point.tail])]
        assert (point in point.anchor.points) == (point.state == "ready" and point.head.stateful)
    assert sorted([*used, *arena.blocks._free]) == list(range(arena.blocks.count))
    for page in pages:
        assert page.holds > 0
        assert page.parent is None or page in page.parent.followers
        assert page.node.host is not page or page.parent is None or page.node.parent.host is page.parent  # type: ignore
        uses = sum(lease.page is page for lease in arena._leases)
        assert page.uses == uses + sum(filling.base is page for filling in arena._fillings)
    for node in arena.tree.nodes():
        assert node.children or node.points or node.pins or node.host is not None or node.device is not None


def ids(*parts: Sequence[int] | int) -> tuple[int, ...]:
    """A prompt: numbers stand for so many tokens from 100 on."""
    return tuple(t for part in parts for t in (range(100, 100 + part) if isinstance(part, int) else part))


LAYOUT = CacheLayout(fingerprint="toy", page_tokens=8, page_bytes=100, pages=9, state_bytes=100)


def make_small_arena(blocks: int) -> Arena:
    """An arena of blocks of 100 bytes, without an engine."""
    return Arena(Blocks(100, map_memory(100 * blocks)))


def make_prompt_trace(
    prompt: Sequence[int], *, salt: str = "", spans: tuple[Span, ...] = (), layout: CacheLayout = LAYOUT
) -> Trace:
    """The trace of a prompt."""
    return make_trace(layout, salt, np.array(prompt, "<i8").tobytes(), spans)


def fill(
    arena: Arena, trace: Trace, *, spare: int = 0, near: int = 0, repeats: bool = False, payload: int = 30
) -> Filling | None:  # fmt: skip
    """Blocks for a state that ends `trace`, with bytes in them."""
    filling = arena.reserve(trace, trace.length, payload)
    if filling is not None:
        for block in filling.blocks:
            arena.blocks.view(block)[:] = bytes([block % 256]) * 100
    return filling


def publish(arena: Arena, filling: Filling, **state: Any) -> CommitPoint | None:
    """Let a filled commit point be found."""
    head = make_head(filling.trace, make_state(filling.trace, **state))
    checksums = [seal(arena.blocks.view(block)) for block in filling.pages]
    tail = [] if filling.tail is None else [arena.blocks.view(filling.tail)]
    pieces = arena.blocks.pieces(filling.payload, head.payload_bytes)
    return arena.publish(filling, head, checksums, seal_point(head, tail, pieces))


def make_state(
    trace: Trace, *, spare: int = 0, near: int = 0, repeats: bool = False, payload: int = 30
) -> SessionState:  # fmt: skip
    """A state that ends `trace`."""
    return SessionState(
        fingerprint="toy", length=trace.length, ids=trace.ids, payload=bytes(payload), spare=spare, near=near,
        repeats=repeats,
    )  # fmt: skip


def put(
    arena: Arena, prompt: Sequence[int], *, salt: str = "", spans: tuple[Span, ...] = (), **state: Any
) -> CommitPoint | None:
    """Keep a commit point; None where there is no room."""
    filling = fill(arena, make_prompt_trace(prompt, salt=salt, spans=spans), **state)
    return None if filling is None else publish(arena, filling, **state)

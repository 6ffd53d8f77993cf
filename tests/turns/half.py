"""A node of a schedule: toy engine, sessions and scheduler, and what another node may ask of it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks
from dsuf.kv.giver import LocalGiver
from dsuf.kv.handoff import Giver, Offer, Piece
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.kv.trace import Trace
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import StepPlan, StepResult, Turn
from tests.kv.rig import check_books
from tests.toy import ToyEngine
from tests.turns.schedule import Setting

CACHE_DEADLINE_S = 0.1
LEASE_S = 0.5
IN_USE = ("turns", "copies", "pages_held", "leases", "filling", "dying")
METRICS = Metrics("test")  # new ones would take longer than the run

Before = Callable[..., float]
"""The seconds that a call takes, by its name (and engine), or its failure."""


def _step_s(plan: StepPlan) -> float:
    """What a step takes."""
    return 0.001 + 0.0005 * len(plan.decode) + 0.0001 * sum(part.stop - part.start for part in plan.prefill)


class WatchedEngine(ToyEngine):
    """Remembers what it was asked to compute of each prompt, and how often each turn was attached. Where its next step
    `fails`, it does so half-way."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(
            pages=setting.pages, page_tokens=setting.page_tokens, max_turns=setting.max_turns, spare=setting.spare,
            replay_tokens=setting.replay_tokens, max_drafts=max(setting.drafts, 1), stop_every=setting.stop_every,
        )  # fmt: skip
        self.step_s = _step_s
        self.fails = False
        self.computed: Counter[str] = Counter()
        self.attached: Counter[str] = Counter()

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        super().attach(turn, pages)
        self.attached[turn.id] += 1

    def compute(self, plan: StepPlan) -> list[StepResult]:
        if self.fails:
            self.fails = False
            self._spoil(plan)
            raise OSError("a fault")
        for part in plan.prefill:
            self.computed[part.turn] += part.stop - part.start
        return super().compute(plan)

    def _spoil(self, plan: StepPlan) -> None:
        """Leave rubbish where `plan` would have left rows, and count it as computed."""
        rubbish = {part.turn: part.stop - part.start for part in plan.prefill}
        rubbish |= {name: 1 for name in plan.decode if self._turns[name].finish is None}
        for name, count in rubbish.items():
            held = self._turns[name]
            for _ in range(count):
                if len(held.fed) >= held.kept:
                    self._write(held, len(held.fed), b"rubbish.")
                held.fed.append(len(held.fed) + 1)


class Half:
    """A node: engine, sessions, scheduler. The one that prefills is asked through `giver`."""

    def __init__(
        self, engine: Any, blocks: int, limits: Limits, before: Before, giver: Giver | None = None
    ) -> None:  # fmt: skip
        self.engine = engine
        size = engine.layout.page_bytes
        self.arena = Arena(Blocks(size, memoryview(bytearray(size * blocks))))
        self.sessions = Sessions(engine, self.arena, METRICS, deadline_s=CACHE_DEADLINE_S)
        self.taker = None
        if giver is not None:
            self.taker = Taker(self.sessions, giver, METRICS, deadline_s=CACHE_DEADLINE_S)
        self.scheduler = Scheduler(engine, limits, METRICS, self.sessions, self.taker)
        self.giver = UnsteadyGiver(self.sessions, self.scheduler.prepare, lease_s=LEASE_S)
        self.giver.before = before
        prefix = "far " if limits.role == "prefill" else ""
        engine.before = lambda call: before(prefix + call, engine)

    def look(self) -> None:
        """Nothing is wrong at this moment."""
        check_books(self.sessions)
        assert not self.engine.violations, self.engine.violations
        held = {stay.turn.id for stay in self.scheduler._places}
        here = {name for name in self.engine._turns if not name.startswith("audit-")}
        assert held == here, "what is attached is what has a place"

    @property
    def in_use(self) -> dict[str, int]:
        """What is zero when idle."""
        counters = self.sessions.counters()
        asked = {"orders": len(self.giver._orders), "lent": len(self.giver._lent)}
        leaving = {"leaving": len(self.taker._leaving) if self.taker else 0}
        return {**self.scheduler.counters(), **{name: counters[name] for name in IN_USE}, **asked, **leaving}

    async def close(self) -> None:
        """Everything comes back."""
        await self.sessions.close()
        counters = self.sessions.counters()
        assert set(counters.values()) == {0}, counters
        assert list(self.arena.tree.nodes()) == []
        assert self.sessions.pool.room == self.engine.layout.pages
        assert self.arena.blocks.free == self.arena.blocks.count
        await self.engine.close()


class UnsteadyGiver(LocalGiver):
    """Asks `before` about each call."""

    before: Callable[[str], float]

    async def offer(
        self, turn: Turn, pages: int, compute: bool = True, trace: Trace | None = None, patience_s: float = 0.5
    ) -> Offer | None:  # fmt: skip
        await asyncio.sleep(self.before("offer"))
        return await super().offer(turn, pages, compute, trace, patience_s)

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        await asyncio.sleep(self.before("read"))
        await super().read(offer, pieces, into)

    async def release(self, offer: Offer) -> bool:
        await asyncio.sleep(self.before("release"))
        return await super().release(offer)

    async def leave(self, turn: Turn) -> None:
        await asyncio.sleep(self.before("leave"))
        await super().leave(turn)

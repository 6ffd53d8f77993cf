"""Random schedules: turns that come, share pages, go on from each other's states, draft, leave and reuse pages.

Whatever the schedule, a turn's tokens are those of the turn alone in an engine of its own.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from dsuf.reference.arithmetic import I64
from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model
from dsuf.reference.speculate import Drafter, HeadDrafter
from dsuf.types import PrefillRange, SessionState, StepPlan, StepResult, Turn
from tests.reference.rig import attach, decode, make_turn, prefill
from tests.reference.test_resume import make_engine
from tests.reference.test_speculate import Noise

WANTED = 14
STEPS = 60


class Kept(NamedTuple):
    """A commit point: references on whole pages, the rows of the last one, and the state."""

    state: SessionState
    pages: list[int]
    last: bytes


class Schedule:
    """An engine, who owns its pages, and what is under way. One step is in flight while the next is planned."""

    def __init__(self, model: Model, drafter: Drafter, prompts: list[I64], seed: int) -> None:
        self.rng, self.prompts = np.random.default_rng(seed), prompts
        self.engine = make_engine(model)
        self.engine.drafter = drafter
        self.engine.facts = msgspec.structs.replace(self.engine.facts, max_drafts=5)
        self.references: Counter[int] = Counter()
        self.turns: dict[str, tuple[Turn, list[int]]] = {}
        self.planned: dict[str, int] = {}
        self.replies: dict[str, list[int]] = {}
        self.ended: list[tuple[Turn, tuple[int, ...]]] = []
        self.leaving: set[str] = set()
        self.kept: list[Kept] = []
        self.flight: tuple[StepPlan, asyncio.Future[list[StepResult]]] | None = None
        self.shared = self.arrived = 0

    async def run(self) -> None:
        """All of the schedule; ends with nothing held."""
        for _ in range(STEPS):
            if len(self.turns) < 3:
                await self.arrive()
            plan = self.plan()
            launched = asyncio.ensure_future(self.engine.step(plan))
            keeping = self.keep() if self.turns and self.rng.random() < 0.5 else None
            await self.land()
            self.flight = plan, launched
            if keeping is not None:
                await keeping
            if self.turns and self.rng.random() < 0.04:
                await self.land()
                self.leaving.add(str(self.rng.choice(list(self.turns))))
            self.let_go({*plan.decode, *(part.turn for part in plan.prefill)} if self.flight else set())
        await self.land()
        self.leaving.update(self.turns)
        self.let_go(set())
        for kept in self.kept:
            self.references.subtract(kept.pages)
        assert set(self.engine.counters().values()) == {0}
        assert set(self.references.values()) == {0}

    async def arrive(self) -> None:
        """Attach a turn behind the longest kept prefix of its prompt; pages come back into use at once."""
        prompt = self.prompts[self.rng.integers(len(self.prompts))]
        turn = make_turn(str(self.arrived), prompt, WANTED)
        self.arrived += 1
        ids, size = prompt.astype("<i8").tobytes(), self.engine.layout.page_tokens
        fits = [kept for kept in self.kept if kept.state.length < len(prompt) and ids.startswith(kept.state.ids)]
        best = max(fits, key=lambda kept: kept.state.length, default=None)
        free = [page for page in range(self.engine.layout.pages) if self.references[page] == 0]
        shared = best.pages if best else []
        wanted = self.engine.layout.pages_for(len(prompt) + WANTED + self.engine.layout.overrun_tokens)
        if len(free) < wanted - len(shared):
            self.references.subtract(self.kept.pop(0).pages)
            return
        pages = [*shared, *free][:wanted]
        self.references.update(pages)
        self.engine.attach(turn, pages)
        self.turns[turn.id], self.planned[turn.id], self.replies[turn.id] = (turn, pages), 0, []
        if best is not None:
            if best.state.length % size:
                await self.engine.write_pages([pages[len(shared)]], [memoryview(best.last)])
            self.planned[turn.id] = await self.engine.resume(turn.id, best.state.length, best.state)
            self.shared += 1

    def plan(self) -> StepPlan:
        """A chunk of some prompts, and decode of some turns whose prompt is planned to its end."""
        ranges, decoding = [], []
        for name, (turn, _) in self.turns.items():
            start, length = self.planned[name], len(turn.prompt.ids)
            if name in self.leaving or self.rng.random() < 0.1:
                continue
            if start == length:
                decoding.append(name)
                continue
            stop = min(length, start + int(self.rng.integers(1, 120)))
            ranges.append(PrefillRange(name, start, stop))
            self.planned[name] = stop
        return StepPlan(prefill=tuple(ranges), decode=tuple(decoding), drafts=int(self.rng.integers(0, 6)))

    async def keep(self) -> None:
        """Ask for the state of a turn as it is after what was launched; its pages stay as long as that is kept."""
        name = str(self.rng.choice(list(self.turns)))
        pages, state = self.turns[name][1], self.engine.read_state(name)
        copies = [bytearray(self.engine.layout.page_bytes) for _ in pages]
        read = self.engine.read_pages(pages, [memoryview(copy) for copy in copies])
        self.references.update(pages)
        found = await state
        await read
        self.references.subtract(pages)
        assert found is not None
        if found.length == 0 or found.length > len(self.turns[name][0].prompt.ids):
            return  # the replies here are not asked for again
        whole = found.length // self.engine.layout.page_tokens
        self.references.update(pages[:whole])
        self.kept.append(Kept(found, pages[:whole], bytes(copies[min(whole, len(copies) - 1)])))
        if len(self.kept) > 6:
            self.references.subtract(self.kept.pop(0).pages)

    async def land(self) -> None:
        """Take in the step in flight. The one launched behind it may name turns that have ended in it."""
        if self.flight is None:
            return
        plan, results = self.flight
        for result in await results:
            assert result.turn not in self.leaving, "a turn that ended yields nothing"
            self.replies[result.turn] += result.ids
            assert result.drafted <= plan.drafts
            if result.finish:
                self.ended.append((self.turns[result.turn][0], tuple(self.replies[result.turn])))
                self.leaving.add(result.turn)
        self.flight = None

    def let_go(self, under_way: set[str]) -> None:
        """Detach the turns that leave, at whatever stage, as soon as no step names them."""
        for name in self.leaving - under_way:
            self.engine.detach(name)
            self.references.subtract(self.turns.pop(name)[1])
            self.leaving.discard(name)


@pytest.fixture(scope="module")
def prompts(ids: I64) -> list[I64]:
    """Prompts that share their beginnings."""
    long = np.concatenate([ids, ids[::-1]])
    return [long[:40], long[:131], long[:280], np.concatenate([long[:128], ids[:30]]), np.concatenate([ids[:60], long])]


@pytest.fixture(scope="module")
def alone(model: Model, prompts: list[I64]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What each prompt gives alone."""
    found = {}
    for ids in prompts:
        engine, turn = make_engine(model), make_turn("a", ids, WANTED)
        attach(engine, turn)
        found[turn.prompt.ids] = tuple(prefill(engine, turn) + decode(engine, turn))
    return found


@pytest.mark.parametrize("seed", [n if n < 2 else pytest.param(n, marks=pytest.mark.full) for n in range(24)])
async def test_no_schedule_changes_a_token(
    model: Model, small_checkpoint: Path, prompts: list[I64], alone: dict[tuple[int, ...], tuple[int, ...]], seed: int
) -> None:
    head = HeadDrafter(load_draft(small_checkpoint, model)) if seed % 2 else Noise(model.config.vocab_size, seed)
    schedule = Schedule(model, head, prompts, seed)
    await schedule.run()
    assert [reply for _, reply in schedule.ended] == [alone[turn.prompt.ids] for turn, _ in schedule.ended]
    print(f"{schedule.arrived} turns, {len(schedule.ended)} to their end, {schedule.shared} behind a kept state")
    assert len(schedule.ended) > 3

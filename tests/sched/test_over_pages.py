"""The loop over the toy engine, whose tokens hang on every row: whatever is shared, put back or cut short, each turn
gets the tokens of a cold run, and nothing stays behind."""

import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from dsuf.engine_scripted import Rule
from dsuf.errors import ContextTooLong, DeadlineExceeded, QueueFull, RequestError
from dsuf.sched.scheduler import Scheduler
from dsuf.types import StepPlan, StepResult, Ticket
from tests.sched.rig import IDLE, make_engine, pass_steps, read, serving, until
from tests.sched.rig import make_turn as make_text_turn
from tests.toy import ToyEngine, make_turn


@asynccontextmanager
async def toying(**options: Any) -> AsyncIterator[tuple[Scheduler, ToyEngine]]:
    """A scheduler over a toy engine; afterwards nothing of any turn is left, and nobody touched foreign rows."""
    limits = {name: options.pop(name) for name in list(options) if name in LIMITS}
    engine = ToyEngine(**options)
    async with serving(engine, **({"chunk_tokens": 16} | limits)) as scheduler:
        yield scheduler, engine
        await until(lambda: scheduler.counters() == IDLE)
        sessions = scheduler._sessions
        await until(lambda: not any(sessions.counters()[name] for name in ("turns", "copies", "pages_held", "leases")))
    assert engine.violations == []
    assert set(engine.counters().values()) == {0}


LIMITS = (
    "queue_limit", "chunk_tokens", "drafts", "gap_s", "step_deadline_s", "probe_s", "failing_steps", "queue_timeout_s",
    "turn_timeout_s", "audit_share", "blocks",
)  # fmt: skip


async def tokens(ticket: Ticket) -> list[int]:
    """All tokens of a turn."""
    return [token for result in await read(ticket) for token in result.ids]


def ids(count: int, seed: int = 0) -> list[int]:
    """Token ids that nobody else uses."""
    return [random.Random(seed * 7919 + i).randrange(1, 900) for i in range(count)]


@pytest.mark.parametrize("replay_tokens", [0, 8])
@pytest.mark.parametrize("drafts", [0, 3])
async def test_a_conversation_has_the_tokens_of_cold_runs(replay_tokens: int, drafts: int) -> None:
    async with toying(replay_tokens=replay_tokens, drafts=drafts) as (scheduler, engine):
        conversation, cached = ids(45), []
        for number in range(5):
            turn = make_turn(f"t{number}", conversation, max_tokens=11)
            results = await read(scheduler.submit(turn))
            reply = [token for result in results for token in result.ids]
            assert reply == engine.cold_tokens(turn)
            usage = results[0].usage
            if usage is not None:
                assert usage.prompt_tokens == len(conversation)
            cached.append(usage.cached_tokens if usage else 0)
            conversation = [*conversation, *reply, *ids(5, number)]
    assert cached[0] == 0 and all(b > a for a, b in itertools.pairwise(cached)), cached


def count(scheduler: Scheduler, name: str) -> int:
    """The value of a counter without labels."""
    found = re.search(rf"^{name}_total (\S+)$", scheduler._metrics.render().decode(), re.M)
    assert found is not None, name
    return int(float(found[1]))


class Recording(ToyEngine):
    """Keeps its plans, and how many steps were under way when each was launched."""

    plans: list[StepPlan]
    depths: list[int]

    async def step(self, plan: StepPlan) -> list[StepResult]:
        self.plans.append(plan)
        self.depths.append(len(self._under_way))
        return await super().step(plan)


def record(engine: ToyEngine) -> Recording:
    """`engine`, which remembers its plans from now on."""
    engine.__class__ = Recording
    engine.plans, engine.depths = [], []  # type: ignore[attr-defined]
    return engine  # type: ignore[return-value]


async def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    async with toying() as (scheduler, engine):
        engine.step_s = lambda plan: 0.002
        recording = record(engine)
        await tokens(scheduler.submit(make_turn("a", ids(40), max_tokens=20)))
        assert recording.depths.count(1) >= 20, "all but the first find another step under way"
        assert max(recording.depths) == 1


async def test_a_very_fast_engine_leaves_the_event_loop_to_others() -> None:
    """Steps take no time at all, and one stream never ends: what else runs on the loop still gets its turn."""
    engine = make_engine(Rule(reply="x" * 100_000), context_tokens=200_000)
    async with serving(engine) as scheduler:
        ticket = scheduler.submit(make_text_turn("a", max_tokens=100_000))
        await pass_steps(scheduler, 10)
        between = []
        for _ in range(50):
            before = scheduler.steps
            await asyncio.sleep(0)
            between.append(scheduler.steps - before)
        steps = scheduler.steps
        ticket.cancel()
    assert max(between) <= 2, between
    assert steps > 30


async def test_a_turn_that_ends_by_its_length_is_in_no_further_step() -> None:
    async with toying() as (scheduler, engine):
        recording = record(engine)
        await tokens(scheduler.submit(make_turn("a", ids(20), max_tokens=6)))
        assert sum("a" in plan.decode for plan in recording.plans) == 5, "the prompt's end gave the first token"


async def test_a_better_priority_takes_the_place_of_the_worst_and_the_latest() -> None:
    async with toying(max_turns=2, pages=64) as (scheduler, engine):
        engine.step_s = lambda plan: 0.001
        turns = {name: make_turn(name, ids(30, i), max_tokens=40, priority=1) for i, name in enumerate("ab")}
        readers = {name: asyncio.create_task(tokens(scheduler.submit(turn))) for name, turn in turns.items()}
        await pass_steps(scheduler, 12)
        first = make_turn("first", ids(9, 5), max_tokens=5)
        assert await tokens(scheduler.submit(first)) == engine.cold_tokens(first)
        assert not any(reader.done() for reader in readers.values())
        for name, turn in turns.items():
            assert await readers[name] == engine.cold_tokens(turn)
        assert count(scheduler, "dsuf_preemptions") == 1


@pytest.mark.parametrize("replay_tokens", [0, 8])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_put_back_again_and_again_a_turn_has_the_same_tokens(
    replay_tokens: int, drafts: int, temperature: float
) -> None:
    """Usage tells what the first stay found; later ones take over what the turn left itself."""
    async with toying(max_turns=1, replay_tokens=replay_tokens, drafts=drafts) as (scheduler, engine):
        engine.step_s = lambda plan: 0.001
        turn = make_turn("low", ids(50), max_tokens=120, priority=5, temperature=temperature, seed=3)
        ticket = scheduler.submit(turn)
        reader = asyncio.create_task(read(ticket))
        for number in range(6):
            await pass_steps(scheduler, 3)
            other = make_turn(f"high{number}", ids(20, number + 1), max_tokens=3)
            assert await tokens(scheduler.submit(other)) == engine.cold_tokens(other)
        results = await reader
        assert [token for result in results for token in result.ids] == engine.cold_tokens(turn)
        assert results[0].usage is None and ticket.usage.computed_tokens == 50
        assert ticket.usage.completion_tokens == len(engine.cold_tokens(turn))
        assert [result.prefilled for result in results] == sorted(result.prefilled for result in results)
        preemptions = count(scheduler, "dsuf_preemptions")
        restored = count(scheduler, "dsuf_session_cache_hit_tokens")
    assert preemptions >= 3
    assert restored >= 40 * (preemptions - 2), "it goes on from where it was put back"


async def test_a_tenant_that_fills_all_places_gives_one_to_another() -> None:
    async with toying(max_turns=3, pages=120, queue_limit=20) as (scheduler, engine):
        engine.step_s = lambda plan: 0.001
        crowd = [make_turn(f"a{i}", ids(20, i), max_tokens=200, tenant="a") for i in range(6)]
        readers = [asyncio.create_task(tokens(scheduler.submit(turn))) for turn in crowd]
        await pass_steps(scheduler, 8)
        for number in range(3):
            small = make_turn(f"b{number}", ids(9, 20 + number), max_tokens=5, tenant="b")
            assert await tokens(scheduler.submit(small)) == engine.cold_tokens(small)
            assert not any(reader.done() for reader in readers)
        assert await asyncio.gather(*readers) == [engine.cold_tokens(turn) for turn in crowd]
        assert 1 <= count(scheduler, "dsuf_preemptions") <= 3, "nobody is put back again and again"


async def test_preemption_frees_pages_too() -> None:
    async with toying(max_turns=4, pages=16) as (scheduler, engine):
        engine.step_s = lambda plan: 0.001
        low = [make_turn(f"low{i}", ids(30, i), max_tokens=20, priority=3) for i in range(2)]
        readers = [asyncio.create_task(tokens(scheduler.submit(turn))) for turn in low]
        await pass_steps(scheduler, 6)
        high = make_turn("high", ids(70, 9), max_tokens=10)
        assert await tokens(scheduler.submit(high)) == engine.cold_tokens(high)
        assert [await reader for reader in readers] == [engine.cold_tokens(turn) for turn in low]


async def test_nobody_is_put_back_for_one_that_would_still_not_fit() -> None:
    async with toying(max_turns=4, pages=16) as (scheduler, engine):
        engine.step_s = lambda plan: 0.001
        same = scheduler.submit(make_turn("same", ids(60, 1), max_tokens=20))
        low = scheduler.submit(make_turn("low", ids(8, 2), max_tokens=20, priority=3))
        readers = [asyncio.create_task(tokens(ticket)) for ticket in (same, low)]
        await pass_steps(scheduler, 6)
        assert await tokens(scheduler.submit(make_turn("high", ids(90, 3), max_tokens=10)))
        await asyncio.gather(*readers)
        assert count(scheduler, "dsuf_preemptions") == 0


async def test_the_first_in_line_is_not_overtaken_by_smaller_ones() -> None:
    async with toying(max_turns=4, pages=16, queue_limit=50) as (scheduler, engine):
        engine.step_s = lambda plan: 0.001
        turns = [make_turn(f"r{i}", ids(20, i), max_tokens=20) for i in range(2)]
        turns += [make_turn("large", ids(100, 50), max_tokens=5)]
        turns += [make_turn(f"s{i}", ids(9, 60 + i), max_tokens=3) for i in range(8)]
        tickets = [scheduler.submit(turn) for turn in turns]
        assert await asyncio.gather(*map(tokens, tickets)) == [engine.cold_tokens(turn) for turn in turns]
    begun = [ticket.attached_s or 0.0 for ticket in tickets]
    assert begun == sorted(begun)


async def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    async with toying(pages=8) as (scheduler, _):
        with pytest.raises(ContextTooLong, match=r"64.*|60.*"):
            scheduler.submit(make_turn("a", ids(60), max_tokens=20))
        assert scheduler.counters() == IDLE


@pytest.mark.parametrize("stage", ["queued", "prefilling", "decoding"])
async def test_a_turn_over_its_deadline_ends_at_any_stage(stage: str) -> None:
    async with toying(max_turns=1) as (scheduler, engine):
        engine.step_s = lambda plan: 0.04
        blocker = scheduler.submit(make_turn("blocker", ids(9, 7), max_tokens=30)) if stage == "queued" else None
        prompt, answer = (400, 9) if stage == "prefilling" else (9, 100)
        late = scheduler.submit(make_turn("late", ids(prompt), max_tokens=answer, timeout_s=0.6))
        with pytest.raises(DeadlineExceeded) as error:
            await read(late)
        assert error.value.status == 504 and ("waiting" if stage == "queued" else stage) in error.value.message
        if blocker is not None:
            assert len(await tokens(blocker)) == 30
    assert 'dsuf_requests_failed_total{error="DeadlineExceeded"} 1.0' in scheduler._metrics.render().decode()


async def test_a_reply_that_could_not_be_kept_to_its_form_is_counted_as_an_error() -> None:
    async with toying(stop_every=3) as (scheduler, engine):
        compute = engine.compute

        def fail(plan: StepPlan) -> list[StepResult]:
            return [replace(result, fault="no text does" if result.finish else None) for result in compute(plan)]

        engine.compute = fail  # type: ignore[method-assign]
        assert (await read(scheduler.submit(make_turn("a", ids(9), max_tokens=30))))[-1].fault
    told = scheduler._metrics.render().decode()
    assert 'dsuf_requests_failed_total{error="FormFailed"} 1.0' in told and "dsuf_requests_finished_total{" not in told


async def test_server_wide_deadlines() -> None:
    async with toying(max_turns=1, queue_timeout_s=0.05, turn_timeout_s=1.5) as (scheduler, engine):
        engine.step_s = lambda plan: 0.01
        running = asyncio.create_task(read(scheduler.submit(make_turn("a", ids(9), max_tokens=500, timeout_s=60))))
        await pass_steps(scheduler, 1)
        with pytest.raises(DeadlineExceeded):
            await read(scheduler.submit(make_turn("b", ids(9))))
        assert not running.done(), "it does not wait any more, so the queue's deadline is nothing to it"
        with pytest.raises(DeadlineExceeded):
            await running
        turn = make_turn("c", ids(9), max_tokens=3)
        assert await tokens(scheduler.submit(turn)) == engine.cold_tokens(turn)


async def test_beyond_the_queue_clients_are_told_when_to_come_back() -> None:
    async with toying(max_turns=1, queue_limit=2) as (scheduler, engine):
        engine.step_s = lambda plan: 0.01
        tickets = [scheduler.submit(make_turn("0", ids(9)))]
        await pass_steps(scheduler, 1)
        tickets += [scheduler.submit(make_turn(str(i), ids(9, i))) for i in (1, 2)]
        with pytest.raises(QueueFull) as full:
            scheduler.submit(make_turn("3", ids(9)))
        assert 1 <= (full.value.retry_after_s or 0) <= 10
        load = scheduler.load()
        assert (load.running, load.waiting, load.waiting_by["normal"]) == (1, 2, 2)
        assert load.pages == {"used": 3, "cached": 0, "free": 61} and load.cache_usage == 3 / 64
        for ticket in tickets:
            ticket.cancel()


async def test_random_lives_leave_nothing_and_every_answer_is_right() -> None:
    """Priorities, tenants, shared prefixes, leaving, deadlines and broken calls, all at once."""
    chance = random.Random(7)
    endings: list[str] = []
    stems = [ids(60, i) for i in range(4)]
    async with toying(
        max_turns=3, pages=40, blocks=60, drafts=2, queue_limit=100, stop_every=23, spare=2, probe_s=0.05,
    ) as (scheduler, engine):  # fmt: skip

        def trouble(name: str) -> float:
            if name != "step" and chance.random() < 0.05:
                raise OSError("no luck")
            return 0.001 if chance.random() < 0.2 else 0.0

        engine.before = trouble

        async def visit(number: int) -> None:
            await asyncio.sleep(chance.random() * 0.5)
            turn = make_turn(
                f"v{number}", [*chance.choice(stems)[: chance.randint(1, 60)], *ids(chance.randint(1, 9), number)],
                max_tokens=chance.randint(1, 30), tenant=chance.choice("abc"), priority=chance.choice([-1, 0, 0, 1]),
                timeout_s=chance.choice([None, None, 0.4]), temperature=chance.choice([0.0, 0.8]), seed=number,
            )  # fmt: skip
            ticket = scheduler.submit(turn)
            leaves_after = chance.choice([99, 99, 99, chance.randint(0, 12)])
            got: list[int] = []
            try:
                async for result in ticket:
                    got += result.ids
                    leaves_after -= 1
                    if leaves_after < 0:
                        ticket.cancel()
                endings.append("left" if leaves_after < 0 else "whole")
            except RequestError as error:
                endings.append(type(error).__name__)
            expected = engine.cold_tokens(turn)
            assert got == expected[: len(got)]
            assert endings[-1] != "whole" or got == expected

        async with asyncio.timeout(30):
            await asyncio.gather(*(visit(number) for number in range(80)))
    assert len(endings) == 80 and {"whole", "left"} <= set(endings), endings
    assert endings.count("whole") >= 30

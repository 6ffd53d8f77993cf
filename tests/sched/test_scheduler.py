"""The loop over the scripted engine: answers, leaving at every stage, failing and hanging engines, refusal."""

import asyncio
import logging
import random
from collections.abc import Sequence

import pytest

from dsuf.engine_scripted import Rule, ScriptedEngine
from dsuf.errors import ContextTooLong, EngineFailed, InvalidRequest, QueueFull, Unavailable
from dsuf.sched.scheduler import Scheduler
from dsuf.types import StepPlan, StepResult, Turn
from tests.sched.rig import make_engine, make_turn, pass_steps, read, read_text, serving, until

IDLE = {"queued": 0, "attached": 0, "running": 0, "writing": 0}


class Recording(ScriptedEngine):
    """A scripted engine that keeps the plans it got."""

    plans: list[StepPlan]

    async def step(self, plan: StepPlan) -> list[StepResult]:
        self.plans.append(plan)
        return await super().step(plan)


def record(engine: ScriptedEngine) -> list[StepPlan]:
    """The plans that `engine` will get from now on."""
    engine.__class__ = Recording
    engine.plans = []  # type: ignore[attr-defined]
    return engine.plans  # type: ignore[attr-defined]


async def test_an_answer_and_its_prefill_progress() -> None:
    async with serving(make_engine(Rule(reply="hi!"))) as scheduler:
        results = await read(scheduler.submit(make_turn("a", "123456789")))
        await until(lambda: scheduler.counters() == IDLE)
    assert [result.prefilled for result in results] == [4, 8, 9, 9, 9, 9]
    assert [len(result.ids) for result in results] == [0, 0, 1, 1, 1, 0]
    assert [result.finish for result in results] == [None] * 5 + ["stop"]


async def test_max_tokens_ends_with_length() -> None:
    async with serving(make_engine(Rule(reply="0123456789", tokens_per_step=4))) as scheduler:
        results = await read(scheduler.submit(make_turn("a", max_tokens=6)))
    assert sum(len(result.ids) for result in results) == 6
    assert results[-1].finish == "length"


async def test_many_turns_at_once_each_get_their_own_answer() -> None:
    rules = [Rule(match=f"<{i}>", reply=f"answer {i}") for i in range(20)]
    engine = make_engine(*rules, max_turns=3)
    plans = record(engine)
    async with serving(engine) as scheduler:
        tickets = [scheduler.submit(make_turn(str(i), f"<{i}>" * (i + 1))) for i in range(20)]
        texts = await asyncio.gather(*map(read_text, tickets))
    assert texts == [f"answer {i}" for i in range(20)]
    assert max(len(plan.decode) + len(plan.prefill) for plan in plans) <= 3
    assert all(sum(part.stop - part.start for part in plan.prefill) <= 4 for plan in plans)
    assert engine.counters() == {"turns": 0, "reserved_tokens": 0}


async def test_a_running_stream_waits_for_at_most_one_chunk() -> None:
    """Long prompts arrive while a stream decodes: it gets a token in every step, and they progress."""
    engine = make_engine(Rule(match="long", reply="x"), Rule(reply="y" * 2000))
    plans = record(engine)
    async with serving(engine, chunk_tokens=64) as scheduler:
        stream = scheduler.submit(make_turn("stream", "go", max_tokens=2000))
        await pass_steps(scheduler, 3)
        long = [scheduler.submit(make_turn(f"long{i}", f"{i}long" + "." * 1500, max_tokens=9)) for i in range(3)]
        await asyncio.gather(*map(read, long))
        stream.cancel()
    first = next(i for i, plan in enumerate(plans) if plan.decode == ("stream",))
    during = plans[first:-1]
    assert all("stream" in plan.decode for plan in during)
    assert sum(bool(plan.prefill) for plan in during) >= 3 * 1500 // 64


async def test_the_reader_never_holds_the_loop() -> None:
    async with serving(make_engine(Rule(reply="abc" * 20))) as scheduler:
        slow = scheduler.submit(make_turn("slow"))
        fast = scheduler.submit(make_turn("fast"))
        assert await read_text(fast) == "abc" * 20
        await until(lambda: scheduler.counters() == IDLE | {"writing": 1})
        assert await read_text(slow) == "abc" * 20
        assert scheduler.counters() == IDLE


async def test_refusals_say_why() -> None:
    async with serving(make_engine(Rule(reply="x" * 50, step_s=0.01), max_turns=1), queue_limit=2) as scheduler:
        with pytest.raises(ContextTooLong, match="maximum context length is 4096 tokens"):
            scheduler.submit(make_turn("big", max_tokens=4092))
        with pytest.raises(InvalidRequest):
            scheduler.submit(make_turn("empty", ""))
        tickets = [scheduler.submit(make_turn("0"))]
        await pass_steps(scheduler, 1)
        tickets += [scheduler.submit(make_turn(str(i))) for i in (1, 2)]
        with pytest.raises(QueueFull) as full:
            scheduler.submit(make_turn("3"))
        assert 1 <= (full.value.retry_after_s or 0) <= 10
        assert full.value.message == "as many requests are waiting already as may: 2"
        with pytest.raises(InvalidRequest, match="already running"):
            scheduler.submit(make_turn("1"))
        tickets[1].cancel()
        scheduler.submit(make_turn("3")).cancel()
        tickets[0].cancel()
        tickets[2].cancel()


async def test_pitfall_16_turns_that_leave_at_random_stages_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    chance = random.Random(5)
    engine = make_engine(Rule(reply="word " * 30, step_s=0.0005, prefill_s_per_token=0.0001), max_turns=16)
    left = dict.fromkeys(("queued", "prefilling", "decoding", "writing"), 0)

    async def visit(scheduler: Scheduler, number: int) -> None:
        prompt = chr(300 + number) * chance.randint(1, 80)
        ticket = scheduler.submit(make_turn(str(number), prompt, max_tokens=chance.randint(1, 60)))
        wanted = list(left)[number % 4]
        if wanted == "writing":
            await until(lambda: ticket.stage == "writing", within_s=10)
        elif wanted != "queued":
            async for _ in ticket:
                if ticket.stage == wanted and chance.random() < 0.3:
                    break
        if ticket.stage in left:
            left[ticket.stage] += 1
        ticket.cancel()
        ticket.cancel()

    async with serving(engine, queue_limit=100) as scheduler:
        await asyncio.gather(*(visit(scheduler, number) for number in range(64)))
        background = scheduler.submit(make_turn("background"))
        await pass_steps(scheduler, 3)
        await until(lambda: scheduler.counters() == {"queued": 0, "attached": 1, "running": 1, "writing": 0})
        assert engine.counters()["turns"] == 1
        background.cancel()
        await until(lambda: scheduler.counters() == IDLE)
        assert await scheduler.wait_idle(1)
    assert engine.counters() == {"turns": 0, "reserved_tokens": 0}
    assert all(count >= 5 for count in left.values()), left
    assert caplog.records == []


@pytest.mark.full
async def test_a_reader_that_waits_sees_the_end_when_the_turn_is_cancelled() -> None:
    async with serving(make_engine(Rule(reply="x", prefill_s_per_token=60))) as scheduler:
        ticket = scheduler.submit(make_turn("a"))
        reader = asyncio.create_task(read(ticket))
        await asyncio.sleep(0.01)
        ticket.cancel()
        assert await asyncio.wait_for(reader, 20) == []


async def test_a_step_that_raises_ends_its_turns_and_no_others() -> None:
    engine = make_engine(Rule(match="bad", reply="xxxx", fail_at_step=2), Rule(reply="fine"), max_turns=1)
    async with serving(engine) as scheduler:
        bad, good = scheduler.submit(make_turn("bad", "bad")), scheduler.submit(make_turn("good"))
        with pytest.raises(EngineFailed) as failure:
            await read(bad)
        assert "script" not in failure.value.message, "no internals for the client"
        assert await read_text(good) == "fine"
        assert scheduler.trouble is None
        await until(lambda: scheduler.counters() == IDLE)


async def test_failing_steps_in_a_row_make_the_node_not_ready_until_a_probe_succeeds() -> None:
    engine = make_engine(Rule(match="bad", fail_at_step=0), Rule(reply="fine"), max_turns=1)
    async with serving(engine, probe_s=0.05, failing_steps=3) as scheduler:
        tickets = [scheduler.submit(make_turn(str(i), "bad")) for i in range(3)]
        waiting = scheduler.submit(make_turn("waiting"))
        for ticket in tickets:
            with pytest.raises(EngineFailed):
                await read(ticket)
        with pytest.raises(Unavailable) as refused:
            await read(waiting)
        assert 1 <= (refused.value.retry_after_s or 0) <= 10
        assert scheduler.trouble == "engine: 3 steps in a row failed"
        with pytest.raises(Unavailable):
            scheduler.submit(make_turn("new"))
        await until(lambda: scheduler.trouble is None)
        assert await read_text(scheduler.submit(make_turn("new"))) == "fine"


async def test_a_step_that_hangs_ends_all_turns_and_heals_when_it_comes_back() -> None:
    engine = make_engine(Rule(match="hang", reply="x", hang_at_step=1, hang_s=0.3), Rule(reply="fine"), max_turns=2)
    async with serving(engine, step_deadline_s=0.1, probe_s=9) as scheduler:
        held = scheduler.submit(make_turn("held", "hang" * 3))
        queued = [scheduler.submit(make_turn(str(i), "hang" * 9)) for i in range(2)]
        for ticket in (held, *queued):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(read(ticket), 1)
        assert scheduler.trouble == "engine: no step finished within 0.1 s"
        with pytest.raises(Unavailable):
            scheduler.submit(make_turn("new"))
        assert engine.counters()["turns"] > 0, "nothing is detached while its step runs"
        await pass_steps(scheduler, 1)
        assert scheduler.trouble is None
        assert await read_text(scheduler.submit(make_turn("new"))) == "fine"
    assert engine.counters()["turns"] == 0


@pytest.mark.full
async def test_stopping_ends_every_turn_even_while_a_step_hangs() -> None:
    engine = make_engine(Rule(reply="x", hang_at_step=0))
    async with serving(engine) as scheduler:
        ticket = scheduler.submit(make_turn("a"))
        await asyncio.sleep(0.02)
    with pytest.raises(Unavailable, match="stopping"):
        await read(ticket)


async def test_refusing_new_turns_lets_the_old_ones_finish() -> None:
    async with serving(make_engine(Rule(reply="whole answer"), max_turns=1)) as scheduler:
        tickets = [scheduler.submit(make_turn(str(i))) for i in range(3)]
        scheduler.refuse(Unavailable("the server is draining", retry_after_s=2))
        with pytest.raises(Unavailable, match="draining"):
            scheduler.submit(make_turn("late"))
        assert not await scheduler.wait_idle(0)
        assert await asyncio.gather(*map(read_text, tickets)) == ["whole answer"] * 3
        assert await scheduler.wait_idle(1)


class Cramped(ScriptedEngine):
    """Has memory for one turn at a time, whatever its facts say, and never for a turn of "huge"."""

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        if turn.id == "huge":
            raise ContextTooLong("maximum context length is 10 tokens")
        if self.counters()["turns"]:
            raise QueueFull("no memory now")
        super().attach(turn, pages)


async def test_a_turn_that_does_not_fit_now_waits_and_one_that_never_fits_ends() -> None:
    engine = make_engine(Rule(reply="fine"))
    engine.__class__ = Cramped
    async with serving(engine) as scheduler:
        tickets = [scheduler.submit(make_turn(str(i))) for i in range(3)]
        huge = scheduler.submit(make_turn("huge"))
        assert await asyncio.gather(*map(read_text, tickets)) == ["fine"] * 3
        with pytest.raises(ContextTooLong):
            await read(huge)


async def test_an_idle_engine_is_probed() -> None:
    engine = make_engine()
    plans = record(engine)
    async with serving(engine, probe_s=0.02) as scheduler:
        before_s = scheduler.progressed_s
        await pass_steps(scheduler, 2)
        assert scheduler.progressed_s > before_s
    assert set(plans) == {StepPlan()}


async def test_late_results_for_unknown_turns_are_normal(caplog: pytest.LogCaptureFixture) -> None:
    class Stray(ScriptedEngine):
        async def step(self, plan: StepPlan) -> list[StepResult]:
            return [*await super().step(plan), StepResult(turn="long gone", ids=(1,), finish="stop")]

    engine = make_engine(Rule(reply="fine"))
    engine.__class__ = Stray
    async with serving(engine) as scheduler:
        assert await read_text(scheduler.submit(make_turn("a"))) == "fine"
    assert caplog.records == []


async def test_gauges_show_what_is_held() -> None:
    async with serving(make_engine(Rule(reply="x" * 99, step_s=0.01), max_turns=1)) as scheduler:
        tickets = [scheduler.submit(make_turn(str(i))) for i in range(3)]
        await pass_steps(scheduler, 3)
        load = scheduler.load()
        assert (load.running, load.waiting) == (1, 2)
        assert (load.pages["used"], load.cache_usage) == (1, 1 / sum(load.pages.values()))
        for ticket in tickets:
            ticket.cancel()


async def test_a_reply_that_was_complete_early_is_not_counted_as_left() -> None:
    engine = make_engine(Rule(reply="x" * 50))
    async with serving(engine) as scheduler:
        for name, reason in (("a", "stop"), ("b", "abort")):
            ticket = scheduler.submit(make_turn(name))
            await anext(aiter(ticket))
            ticket.cancel(reason)  # type: ignore[arg-type]
        text = scheduler._metrics.render().decode()
    assert 'dsuf_requests_finished_total{finished_reason="stop"} 1.0' in text
    assert 'dsuf_requests_finished_total{finished_reason="abort"} 1.0' in text


async def test_tokens_behind_a_stop_string_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dsuf")
    async with serving(make_engine(Rule(reply="x" * 50, tokens_per_step=8))) as scheduler:
        ticket = scheduler.submit(make_turn("a"))
        steps = aiter(ticket)
        while ticket.generated_tokens < 9:
            await anext(steps)
        ticket.cancel("stop", used_tokens=3)
        assert ticket.generated_tokens > 3
        text = scheduler._metrics.render().decode()
    assert "dsuf_generation_tokens_total 3.0" in text
    (ended,) = [record for record in caplog.records if record.getMessage() == "turn ended"]
    assert ended.fields["completion_tokens"] == 3 and ended.fields["reason"] == "stop"  # type: ignore[attr-defined]


async def test_whatever_happens_every_turn_ends_and_nothing_stays() -> None:
    """Readers that leave, prompts that make the engine raise, steps over the deadline, all at once."""
    chance = random.Random(11)
    engine = make_engine(
        Rule(match="raise", reply="x" * 9, fail_at_step=2),
        Rule(match="late", reply="x" * 9, hang_at_step=1, hang_s=0.04, times=3),
        Rule(reply="answer", step_s=0.0002),
    )
    endings: list[str] = []

    async def visit(scheduler: Scheduler, name: str, prompt: str) -> None:
        for _ in range(200):
            try:
                ticket = scheduler.submit(make_turn(name, prompt, max_tokens=chance.randint(1, 12)))
                break
            except (QueueFull, Unavailable):
                await asyncio.sleep(0.01)
        else:
            raise AssertionError("never admitted")
        try:
            async for result in ticket:
                if result.finish is not None:
                    endings.append(result.finish)
                if chance.random() < 0.02:
                    endings.append("left")
                    break
        except (EngineFailed, Unavailable) as error:
            endings.append(type(error).__name__)
        ticket.cancel()

    async with serving(engine, queue_limit=20, step_deadline_s=0.03, probe_s=0.02) as scheduler:
        prompts = [chance.choice(["fine"] * 8 + ["raise", "late"]) * chance.randint(1, 9) for _ in range(150)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(visit(scheduler, str(i), prompt) for i, prompt in enumerate(prompts)))
        await until(lambda: scheduler.counters() == IDLE)
    assert set(engine.counters().values()) == {0}
    assert {"stop", "length", "left", "EngineFailed", "Unavailable"} <= set(endings)
    assert len(endings) >= 150

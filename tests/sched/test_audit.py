"""The speculation audit: it finds what drafts change, disturbs nobody, and keeps no promise that it cannot."""

import asyncio
import logging
import re

import msgspec
import pytest

from dsuf.sched import audit
from dsuf.sched.scheduler import Scheduler
from dsuf.types import StepPlan, StepResult
from tests.sched.rig import read, until
from tests.sched.test_over_pages import ids, tokens, toying
from tests.toy import ToyEngine, make_turn


def audits(scheduler: Scheduler) -> dict[str, int]:
    """How audits ended so far."""
    text = scheduler._metrics.render().decode()
    found = re.findall(r'^dsuf_speculation_audits_total\{result="([\w ]+)"\} (\S+)$', text, re.M)
    return {name: int(float(value)) for name, value in found}


class Corrupting(ToyEngine):
    """Whose drafts change the fifth token of an answer."""

    def compute(self, plan: StepPlan) -> list[StepResult]:
        results = super().compute(plan)
        if not plan.drafts:
            return results
        return [self.spoil(result) for result in results]

    def spoil(self, result: StepResult) -> StepResult:
        """The result, with a wrong token where it has several."""
        if len(result.ids) < 2:
            return result
        return msgspec.structs.replace(result, ids=(*result.ids[:-1], result.ids[-1] % 900 + 1))


@pytest.mark.parametrize("replay_tokens", [0, 8])
async def test_right_drafts_pass_from_whatever_a_turn_began_with(replay_tokens: int) -> None:
    async with toying(drafts=3, audit_share=1.0, replay_tokens=replay_tokens) as (scheduler, engine):
        conversation = ids(45)
        for number in range(4):
            turn = make_turn(f"t{number}", conversation, max_tokens=11)
            reply = await tokens(scheduler.submit(turn))
            assert reply == engine.cold_tokens(turn)
            await until(lambda number=number: sum(audits(scheduler).values()) == number + 1)  # type: ignore[misc]
            conversation = [*conversation, *reply, *ids(5, number)]
        assert "different" not in audits(scheduler) and audits(scheduler)["same"] >= 2, audits(scheduler)


async def test_a_draft_that_changes_an_answer_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with toying(drafts=3, audit_share=1.0) as (scheduler, engine):
        engine.__class__ = Corrupting
        ticket = scheduler.submit(make_turn("spoilt", ids(20), max_tokens=40))
        answer = await tokens(ticket)
        await until(lambda: audits(scheduler) == {"different": 1})
    (record,) = [record for record in caplog.records if record.getMessage() == "drafts changed an answer"]
    fields = record.fields  # type: ignore[attr-defined]
    cold = engine.cold_tokens(ticket.turn)
    assert fields["turn"] == "spoilt"
    assert fields["at_token"] == next(i for i, (a, b) in enumerate(zip(answer, cold, strict=True)) if a != b)


async def test_a_share_of_greedy_turns_with_drafts_is_audited_and_no_others() -> None:
    async with toying(drafts=3, audit_share=0.25) as (scheduler, _):
        for number in range(8):
            await tokens(scheduler.submit(make_turn(f"t{number}", ids(9, number), max_tokens=9)))
            await tokens(scheduler.submit(make_turn(f"s{number}", ids(9, number), max_tokens=9, temperature=1.0)))
            await tokens(scheduler.submit(make_turn(f"o{number}", ids(9, number), max_tokens=1)))
        await until(lambda: audits(scheduler) == {"same": 2})
        await asyncio.sleep(2 * audit.SETTLE_S)
        assert audits(scheduler) == {"same": 2}


async def test_a_turn_that_was_put_back_is_not_audited() -> None:
    """A window may have been replayed in the midst of its answer, which an audit would not do."""
    async with toying(drafts=3, audit_share=1.0, max_turns=1) as (scheduler, engine):
        engine.step_s = lambda plan: 0.002
        late = scheduler.submit(make_turn("late", ids(9), max_tokens=40, priority=1))
        await until(lambda: late.stage == "decoding")
        soon = scheduler.submit(make_turn("soon", ids(9, 1), max_tokens=9))
        await asyncio.gather(tokens(late), tokens(soon))
        assert late.was_put_back
        await until(lambda: audits(scheduler) == {"same": 1})
        await asyncio.sleep(2 * audit.SETTLE_S)
        assert audits(scheduler) == {"same": 1}


async def test_without_drafts_nothing_is_audited() -> None:
    async with toying(drafts=0, audit_share=1.0) as (scheduler, _):
        await tokens(scheduler.submit(make_turn("t", ids(9), max_tokens=9)))
        await asyncio.sleep(2 * audit.SETTLE_S)
        assert audits(scheduler) == {}


async def test_an_audit_gives_way_at_once_and_is_tried_again() -> None:
    async with toying(drafts=3, audit_share=1.0, max_turns=1) as (scheduler, engine):
        first = make_turn("first", ids(20), max_tokens=60)
        await tokens(scheduler.submit(first))
        plans = list[StepPlan]()
        engine.step_s = lambda plan: plans.append(plan) or 0.01  # type: ignore[func-returns-value]
        await until(lambda: any(name.startswith("audit") for name in engine._turns))
        before = len(plans)
        second = make_turn("second", ids(9, 1), max_tokens=3, temperature=1.0)
        ticket = scheduler.submit(second)
        await anext(aiter(ticket))
        waited = len(plans) - before
        await read(ticket)
        assert audits(scheduler) == {}, "it was broken off"
        engine.step_s = lambda plan: 0.0
        await until(lambda: audits(scheduler) == {"same": 1})
    assert waited < 10, "far less than the sixty steps that the audit takes"


async def test_the_backlog_is_bounded_and_so_are_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ATTEMPTS", 1)
    async with toying(drafts=3, audit_share=1.0) as (scheduler, engine):
        turns = [make_turn(f"t{i}", ids(9, i), max_tokens=20) for i in range(10)]
        await asyncio.gather(*(tokens(scheduler.submit(turn)) for turn in turns))
        assert audits(scheduler) == {"skipped": 10 - audit.BACKLOG}
        engine.step_s = lambda plan: 0.01
        await until(lambda: any(name.startswith("audit") for name in engine._turns))
        await tokens(scheduler.submit(make_turn("real", ids(9, 11), max_tokens=1)))
        await until(lambda: audits(scheduler).get("given up") == 1)
        engine.step_s = lambda plan: 0.0
        await until(lambda: audits(scheduler).get("same") == audit.BACKLOG - 1)


async def test_what_cannot_begin_where_it_began_is_skipped() -> None:
    async with toying(drafts=3, audit_share=1.0, replay_tokens=8) as (scheduler, engine):
        stem = ids(64)
        await tokens(scheduler.submit(make_turn("a", stem, max_tokens=1)))
        engine.step_s = lambda plan: 0.002
        ticket = scheduler.submit(make_turn("b", [*stem, *ids(9, 1)], max_tokens=20))
        reader = asyncio.create_task(read(ticket))
        await until(lambda: ticket.stage == "decoding")
        scheduler._sessions.flush()
        results = await reader
        assert results[0].usage is not None and results[0].usage.cached_tokens > 0
        await until(lambda: sum(audits(scheduler).values()) == 1)
        assert audits(scheduler) in ({"skipped": 1}, {"same": 1})


async def test_an_engine_that_fails_in_an_audit_is_no_trouble_of_anybody(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ToyEngine):
        def compute(self, plan: StepPlan) -> list[StepResult]:
            if any(name.startswith("audit") for name in plan.decode):
                raise OSError("broken")
            return super().compute(plan)

    async with toying(drafts=3, audit_share=1.0) as (scheduler, engine):
        engine.__class__ = Failing
        await tokens(scheduler.submit(make_turn("t", ids(9), max_tokens=20)))
        await until(lambda: audits(scheduler) == {"skipped": 1})
        turn = make_turn("u", ids(9, 1), max_tokens=20)
        assert await tokens(scheduler.submit(turn)) == engine.cold_tokens(turn)
        assert scheduler.trouble is None

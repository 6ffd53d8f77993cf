"""What computing a prompt is expected to take, beside what an engine has to do already."""

import asyncio

import pytest

from dsuf.sched.cost import Cost, Shape
from dsuf.sched.outlook import MOST_LATE, Scene, predict_token_s
from dsuf.sched.policy import Rules
from tests.sched.rig import make_engine, make_scheduler, make_turn

COST = Cost(step_s=0.02, row_s=0.01, token_s=0.001)
RULES = Rules(chunk_tokens=100, gap_s=0.2)


def predict(tokens: int = 500, cost: Cost = COST, **scene: object) -> float:
    """Seconds a token of a prompt of so many."""
    return predict_token_s(tokens, Scene(**scene), cost, RULES)  # type: ignore[arg-type]


def test_alone_a_token_takes_its_share_of_a_full_chunk() -> None:
    assert predict() == pytest.approx(COST.predict_s(Shape(tokens=100)) / 100)


def test_streams_make_chunks_short_and_prompts_slow() -> None:
    """Four rows leave 0.1 s of the bound, which chunks may well exceed by a quarter: a hundred tokens; eight forty."""
    few, many = predict(rows=4), predict(rows=8)
    assert few == pytest.approx((0.02 + 0.04 + 0.1) / 100)
    assert many == pytest.approx((0.02 + 0.08 + 0.06) / 60)


def test_other_prompts_take_as_much_time_until_they_are_done() -> None:
    assert predict(rests=[500]) == pytest.approx(2 * predict())
    assert predict(rests=[9000, 9000]) == pytest.approx(3 * predict())
    assert predict(rests=[50]) == pytest.approx(1.1 * predict())


def test_a_late_step_tells_of_the_machine_as_it_is() -> None:
    assert predict(step_tokens=100, expected_s=0.12, passed_s=0.1) == predict()
    assert predict(step_tokens=100, expected_s=0.12, passed_s=0.24) == pytest.approx(2 * predict())
    assert predict(expected_s=0.001, passed_s=0.03) == predict(), "a pause that any step may have"
    assert predict(expected_s=0.1, passed_s=60.0) == pytest.approx(MOST_LATE * predict()), "it may stand still"


def test_before_anything_was_measured_the_first_step_tells() -> None:
    nothing = Cost(known_tokens=0)
    assert predict(cost=nothing) == 0.0
    assert predict(cost=nothing, rests=[300]) == 0.0
    assert predict(cost=nothing, step_tokens=100, passed_s=1.5) == pytest.approx(0.015)
    assert predict(cost=nothing, step_tokens=100, passed_s=1.5, rests=[500]) == pytest.approx(0.03)


async def test_a_scheduler_sees_what_is_there() -> None:
    """Nothing is known, then a chunk is under way, then it came back and more are to come."""
    engine = make_engine()
    gate, begun = asyncio.Event(), asyncio.Event()
    step = engine.step

    async def wait_then_step(plan: object) -> object:
        if begun.is_set():
            await asyncio.sleep(0.01)
        begun.set()
        await gate.wait()
        return await step(plan)  # type: ignore[arg-type]

    engine.step = wait_then_step  # type: ignore[method-assign,assignment]
    scheduler = make_scheduler(engine, chunk_tokens=8)
    assert scheduler.token_s(100) == 0.0
    running = asyncio.create_task(scheduler.run())
    ticket = scheduler.submit(make_turn("t", "x" * 64, max_tokens=2))
    await begun.wait()
    await asyncio.sleep(0.1)
    assert scheduler.token_s(64) > 0.1 / 8, "the chunk of eight tokens has taken so long already"
    gate.set()
    async for _ in ticket:
        pass
    alone_s = scheduler.token_s(100)
    assert 0 < alone_s < 0.1
    ticket.cancel()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

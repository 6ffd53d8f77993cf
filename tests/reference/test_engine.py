"""The engine protocol: what comes out of plans, what is refused, what is held."""

import msgspec
import numpy as np
import pytest

from dsuf.errors import ContextTooLong, EngineFailed, QueueFull
from dsuf.reference.arithmetic import I64
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.model import Model, PrefillMode
from dsuf.types import PrefillRange, StepPlan, StepResult, Turn
from tests.reference.rig import attach, make_turn, tokens


def make_engine(model: Model, prefill: PrefillMode = "exact") -> ReferenceEngine:
    return ReferenceEngine(model, "reference", "test", context_tokens=400, max_turns=3, prefill=prefill)


def generate(engine: ReferenceEngine, turn: Turn, chunk: int) -> list[StepResult]:
    """Run `turn` alone to its end."""
    attach(engine, turn)
    results, length = [], len(turn.prompt.ids)
    for start in range(0, length, chunk):
        plan = StepPlan(prefill=(PrefillRange(turn.id, start, min(start + chunk, length)),))
        results += engine.run(plan)
    while results[-1].finish is None:
        results += engine.run(StepPlan(decode=(turn.id,)))
    engine.detach(turn.id)
    return results


@pytest.mark.parametrize("prefill", ["exact", "replay"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_depend_on_chunks(model: Model, ids: I64, prefill: PrefillMode, temperature: float) -> None:
    engine, turn = make_engine(model, prefill), make_turn("a", ids[:90], temperature=temperature)
    whole = generate(engine, turn, 90)
    assert tokens(whole) == tokens(generate(engine, turn, 13))
    assert len(tokens(whole)) == 8
    assert whole[-1].finish == "length"
    assert [result.prefilled for result in generate(engine, turn, 40)][:3] == [40, 80, 90]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_depend_on_the_batch(model: Model, ids: I64, temperature: float) -> None:
    engine = make_engine(model)
    turns = [make_turn(str(n), ids[n : n + 30 + n], temperature=temperature) for n in range(3)]
    alone = [tokens(generate(engine, turn, 64)) for turn in turns]
    for turn in turns:
        attach(engine, turn)
    first = engine.run(StepPlan(prefill=tuple(PrefillRange(t.id, 0, len(t.prompt.ids)) for t in turns)))
    together = {result.turn: list(result.ids) for result in first}
    for _ in range(7):
        for result in engine.run(StepPlan(decode=tuple(turn.id for turn in turns))):
            together[result.turn] += result.ids
    assert [together[turn.id] for turn in turns] == alone


def test_end_of_sentence_ends_the_turn_and_is_not_handed_out(model: Model, ids: I64) -> None:
    engine = make_engine(model)
    expected = tokens(generate(engine, make_turn("a", ids[:40]), 40))
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=expected[3])
    results = generate(engine, make_turn("a", ids[:40]), 40)
    assert tokens(results) == expected[: expected.index(expected[3])]
    assert results[-1].finish == "stop"
    assert results[-1].ids == ()


def test_counters_are_zero_when_idle(model: Model, ids: I64) -> None:
    engine = make_engine(model)
    attach(engine, make_turn("a", ids[:20]))
    assert engine.counters()["turns"] == 1
    engine.detach("a")
    engine.detach("a")
    assert set(engine.counters().values()) == {0}


def test_what_cannot_fit_is_refused_with_the_numbers(model: Model, ids: I64) -> None:
    engine = make_engine(model)
    with pytest.raises(ContextTooLong, match="maximum context length is 400 tokens"):
        engine.attach(make_turn("a", ids[:20], max_tokens=381), range(4))
    for name in "abc":
        attach(engine, make_turn(name, ids[:20]))
    with pytest.raises(QueueFull):
        attach(engine, make_turn("d", ids[:20]))


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(decode=("nobody",)),
        StepPlan(prefill=(PrefillRange("a", 5, 10),)),
        StepPlan(prefill=(PrefillRange("a", 0, 21),)),
        StepPlan(prefill=(PrefillRange("a", 0, 0),)),
        StepPlan(decode=("a",)),
        StepPlan(drafts=2),
    ],
    ids=str,
)
def test_plans_that_cannot_be_run_are_typed(model: Model, ids: I64, plan: StepPlan) -> None:
    engine = make_engine(model)
    attach(engine, make_turn("a", ids[:20]))
    with pytest.raises(EngineFailed):
        engine.run(plan)


async def test_steps_run_off_the_loop_and_close_ends(model: Model, ids: I64) -> None:
    engine = make_engine(model)
    attach(engine, make_turn("a", ids[:20]))
    results = await engine.step(StepPlan(prefill=(PrefillRange("a", 0, 20),)))
    assert np.size(results[0].ids) == 1
    await engine.close()
    assert engine.counters()["turns"] == 0

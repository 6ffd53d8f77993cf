"""The scripted engine keeps the engine contract, and its script says what is wrong with it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from dsuf.engine_scripted import NO_RULE, Rule, Script, ScriptedEngine, load_script
from dsuf.errors import CheckpointError, CommandError, ContextTooLong, QueueFull
from dsuf.types import EngineFacts, PrefillRange, Prompt, Sampling, StepPlan, StepResult, Turn


def encode(text: str) -> list[int]:
    """One id a character."""
    return [ord(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def make_engine(*rules: Rule, max_turns: int = 4, **options: Any) -> ScriptedEngine:
    facts = EngineFacts(
        name="scripted", device="none", context_tokens=4096, max_turns=max_turns, vocabulary=0x110000, eos_id=1
    )
    return ScriptedEngine(Script(rules=rules), encode, decode, facts, **options)


def make_turn(
    name: str, prompt: str = "hello", max_tokens: int = 100, opens_in: Literal["reasoning", "content"] = "content"
) -> Turn:
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=max_tokens)
    return Turn(id=name, prompt=Prompt(ids=tuple(encode(prompt)), opens_in=opens_in), sampling=sampling)


async def prefill(engine: ScriptedEngine, turn: Turn, start: int = 0, stop: int = 0) -> list[StepResult]:
    part = PrefillRange(turn.id, start, stop or len(turn.prompt.ids))
    return await engine.step(StepPlan(prefill=(part,)))


async def run(engine: ScriptedEngine, turn: Turn) -> list[StepResult]:
    """All results of `turn`, alone in an engine."""
    engine.attach(turn, range(engine.layout.pages))
    results = await prefill(engine, turn)
    while results[-1].finish is None:
        results += await engine.step(StepPlan(decode=(turn.id,)))
    engine.detach(turn.id)
    return results


def read_text(results: list[StepResult]) -> str:
    return decode([token for result in results for token in result.ids])


async def answer(prompts: list[str], *rules: Rule) -> list[str]:
    """The answers to `prompts`, one after the other."""
    engine = make_engine(*rules)
    return [read_text(await run(engine, make_turn(str(i), text))) for i, text in enumerate(prompts)]


async def test_the_first_rule_that_fits_answers() -> None:
    rules = [
        Rule(match=("tools", "<tool_result>"), reply="done"),
        Rule(match="tools", absent="draft", reply="call"),
        Rule(match="once", times=1, reply="first"),
        Rule(turn=4, reply="by number"),
    ]
    prompts = ["tools", "tools <tool_result>", "once", "once", "anything", "tools draft"]
    assert await answer(prompts, *rules) == ["call", "done", "first", NO_RULE, "by number", NO_RULE]


async def test_reasoning_comes_only_where_the_prompt_opens_in_it() -> None:
    engine = make_engine(Rule(reasoning="why", reply="so"))
    reasoning = await run(engine, make_turn("a", opens_in="reasoning"))
    assert [read_text(reasoning), read_text(await run(engine, make_turn("b")))] == ["why</think>so", "so"]


async def test_ids_and_length() -> None:
    results = await run(make_engine(Rule(ids=(65, 66), finish="length")), make_turn("a"))
    assert read_text(results) == "AB"
    assert results[-1].ids and results[-1].finish == "length"
    results = await run(make_engine(Rule(reply="abcdef", tokens_per_step=3)), make_turn("a", max_tokens=5))
    assert [len(result.ids) for result in results] == [1, 3, 1]
    assert results[-1].finish == "length"


async def test_the_contract_is_kept() -> None:
    engine = make_engine(Rule(reply="x", step_s=0.02), max_turns=1)
    with pytest.raises(ContextTooLong):
        engine.attach(make_turn("a", max_tokens=4095), range(40))
    with pytest.raises(ContextTooLong, match="1 pages do not hold 133 tokens"):
        engine.attach(make_turn("a", max_tokens=128), [7])
    engine.attach(make_turn("a"), [7])
    assert engine.counters() == {"turns": 1, "reserved_tokens": 105}
    with pytest.raises(QueueFull):
        engine.attach(make_turn("b"), [8])
    with pytest.raises(RuntimeError, match="does not continue"):
        await prefill(engine, make_turn("a"), 1, 5)
    with pytest.raises(RuntimeError, match="before the end of prefill"):
        await engine.step(StepPlan(decode=("a",)))
    await prefill(engine, make_turn("a"))
    running = asyncio.ensure_future(engine.step(StepPlan(decode=("a",))))
    await asyncio.sleep(0.005)
    with pytest.raises(RuntimeError, match="while its step runs"):
        engine.detach("a")
    await running
    engine.detach("a")
    engine.detach("a")
    assert set(engine.counters().values()) == {0}
    assert await engine.step(StepPlan()) == []


async def test_calls_take_effect_in_the_order_in_which_they_are_made() -> None:
    """Steps launched before others came back go on from what those leave; a state is the one at its place."""
    engine, turn = make_engine(Rule(reply="xyz", step_s=0.01)), make_turn("a")
    engine.attach(turn, [3])
    calls = [prefill(engine, turn, 0, 3), prefill(engine, turn, 3, 5)]
    first, last = (asyncio.ensure_future(call) for call in calls)
    await asyncio.sleep(0)
    state, steps = engine.read_state("a"), [engine.step(StepPlan(decode=("a",))) for _ in range(5)]
    later = engine.read_state("a")
    found, results = await later, [result for step in steps for result in await step]
    assert (await first)[0].prefilled == 3
    assert read_text(await last + results) == "xyz"
    assert results[-1].finish == "stop"
    assert len(results) == 3, "a turn that ended yields nothing in later plans"
    at_prompt = await state
    assert at_prompt is not None and found is not None
    assert (at_prompt.length, found.length) == (5, 8)


async def test_a_call_that_was_given_up_is_carried_out_in_its_place() -> None:
    engine, turn = make_engine(Rule(reply="xyz", step_s=0.02)), make_turn("a")
    engine.attach(turn, [3])
    await prefill(engine, turn)
    running = asyncio.ensure_future(engine.step(StepPlan(decode=("a",))))
    given_up = asyncio.ensure_future(engine.step(StepPlan(decode=("a",))))
    after = engine.read_state("a")
    await asyncio.sleep(0.005)
    given_up.cancel()
    state = await after
    assert running.done() or (await running)
    assert state is not None and state.length == 7
    engine.detach("a")


async def test_a_session_travels() -> None:
    source, target = make_engine(Rule(reply="xy")), make_engine()
    first, second = make_turn("a", "hello"), make_turn("b", "help")
    source.attach(first, [2])
    await prefill(source, first, 0, 3)
    state, page = await source.read_state("a"), bytearray(source.layout.page_bytes)
    await source.read_pages([2], [memoryview(page)])
    assert state is not None and len(state.payload) <= source.layout.state_bytes
    assert (state.length, list(memoryview(state.ids).cast("q"))) == (3, encode("hel"))
    target.attach(second, [5])
    await target.write_pages([5], [memoryview(page)])
    for wrong in (
        msgspec.structs.replace(state, fingerprint="other"),
        msgspec.structs.replace(state, payload=b""),
        msgspec.structs.replace(state, ids=b"\1" + state.ids[1:]),
        msgspec.structs.replace(state, length=2),
        None,
    ):
        with pytest.raises(CheckpointError):
            await target.resume("b", 3, wrong)
    assert await target.resume("b", 2, state) == 2
    await prefill(target, second, 2)


@pytest.mark.parametrize("length", [3, 140])
async def test_wrong_pages_show(length: int) -> None:
    prompt = "".join(chr(200 + i) for i in range(150))
    turn, other = make_turn("a", prompt), make_turn("b", prompt)
    engine = make_engine(Rule(reply="x"), replay_tokens=16)
    engine.attach(turn, [4, 5])
    await prefill(engine, turn, 0, length)
    assert await engine.read_state("a") is None
    for pages, right in (([4, 5, 6], True), ([4, 6, 7], length < 128), ([7, 8, 9], False)):
        engine.attach(other, pages)
        start = await engine.resume("b", length, None)
        assert start == max(0, length - 16)
        try:
            assert (await prefill(engine, other, start))[0].ids == (ord("x"),)
            assert right
        except RuntimeError as error:
            assert "hold other ids" in str(error) and not right
        engine.detach("b")


async def test_closing_breaks_off_what_hangs() -> None:
    engine, turn = make_engine(Rule(hang_at_step=0)), make_turn("a")
    engine.attach(turn, [0])
    hanging = asyncio.create_task(prefill(engine, turn))
    await asyncio.sleep(0.01)
    await engine.close()
    assert (await asyncio.gather(hanging, return_exceptions=True)) != []
    assert set(engine.counters().values()) == {0}


def test_a_wrong_script_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"rules": [{"match": ["a", "b"], "reply": "c", "step_s": 0.5}]}))
    assert load_script(path).rules == (Rule(match=("a", "b"), reply="c", step_s=0.5),)
    for text in ("{", '{"rules": [{"replay": "x"}]}', '{"rules": [{"turn": "x"}]}', "[]"):
        path.write_text(text)
        with pytest.raises(CommandError, match=r"script: .*script\.json"):
            load_script(path)
    with pytest.raises(CommandError, match="cannot read"):
        load_script(tmp_path / "missing.json")

"""The scripted engine keeps the engine contract, and its script says what is wrong with it."""

import asyncio
import json
from pathlib import Path

import pytest

from dsuf.engine_scripted import NO_RULE, Rule, load_script
from dsuf.errors import CheckpointError, CommandError, ContextTooLong, QueueFull
from dsuf.types import PrefillRange, Prompt, SessionCache, StepPlan, Turn
from tests.sched.rig import decode, encode, make_engine, make_turn, read_text, serving


async def answer(prompts: list[str], *rules: Rule) -> list[str]:
    """The answers to `prompts`, one after the other."""
    async with serving(make_engine(*rules)) as scheduler:
        return [await read_text(scheduler.submit(make_turn(str(i), text))) for i, text in enumerate(prompts)]


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
    engine, texts = make_engine(Rule(reasoning="why", reply="so")), []
    async with serving(engine) as scheduler:
        for opens_in in ("reasoning", "content"):
            turn = make_turn(opens_in)
            prompt = Prompt(ids=turn.prompt.ids, opens_in=opens_in)
            turn = Turn(id=turn.id, prompt=prompt, sampling=turn.sampling)
            texts.append(await read_text(scheduler.submit(turn)))
    assert texts == ["why</think>so", "so"]


async def test_ids_and_length() -> None:
    async with serving(make_engine(Rule(ids=(65, 66), finish="length"))) as scheduler:
        results = [result async for result in scheduler.submit(make_turn("a"))]
    assert decode([token for result in results for token in result.ids]) == "AB"
    assert results[-1].ids and results[-1].finish == "length"


async def test_the_contract_is_kept() -> None:
    engine = make_engine(Rule(reply="x", step_s=0.02), max_turns=1)
    with pytest.raises(ContextTooLong):
        engine.attach(make_turn("a", max_tokens=4095))
    engine.attach(make_turn("a"))
    assert engine.counters() == {"turns": 1, "reserved_tokens": 105}
    with pytest.raises(QueueFull):
        engine.attach(make_turn("b"))
    with pytest.raises(RuntimeError, match="does not continue"):
        await engine.step(StepPlan(prefill=(PrefillRange("a", 1, 5),)))
    with pytest.raises(RuntimeError, match="before the end of prefill"):
        await engine.step(StepPlan(decode=("a",)))
    await engine.step(StepPlan(prefill=(PrefillRange("a", 0, 5),)))
    running = asyncio.create_task(engine.step(StepPlan(decode=("a",))))
    await asyncio.sleep(0.005)
    with pytest.raises(RuntimeError, match="while its step runs"):
        engine.detach("a")
    with pytest.raises(RuntimeError, match="already"):
        await engine.step(StepPlan())
    await running
    engine.detach("a")
    engine.detach("a")
    assert set(engine.counters().values()) == {0}
    assert await engine.step(StepPlan()) == []


async def test_a_session_travels() -> None:
    source, target = make_engine(Rule(reply="xy")), make_engine()
    source.attach(make_turn("a", "hello"))
    await source.step(StepPlan(prefill=(PrefillRange("a", 0, 3),)))
    cache = await source.export_session("a")
    assert (cache.length, list(memoryview(cache.ids).cast("q"))) == (3, encode("hel"))
    target.attach(make_turn("b", "help"))
    await target.import_session("b", cache, 3)
    await target.step(StepPlan(prefill=(PrefillRange("b", 3, 4),)))
    with pytest.raises(CheckpointError):
        await target.import_session("b", SessionCache(fingerprint="other", length=0, ids=b"", parts={}), 0)


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

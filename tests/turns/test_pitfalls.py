"""Known pitfalls of other servers, each through scheduler, sessions and engine together."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsuf.node.node import Node as RealNode
from dsuf.sched.ticket import TurnTicket
from tests.node.rig import Client, running, write_script
from tests.reference.test_speculate import Planned
from tests.sched.rig import until
from tests.toy import ToyEngine, make_turn
from tests.turns.clock import run_virtually
from tests.turns.node import Node, serving
from tests.turns.reference import Oracle
from tests.turns.test_equalities import TEXT, check_cold, run, say

PROMPT = list(range(1, 42))


async def read_to_stop(node: Node, name: str, wanted: int) -> tuple[list[int], int]:
    """Read a reply up to its token number `wanted`, where a stop string ends; its tokens, and how many are counted."""
    ticket = node.scheduler.submit(make_turn(name, PROMPT, max_tokens=60))
    tokens: list[int] = []
    async for result in ticket:
        for token in result.ids:
            tokens.append(token)
            if len(tokens) == wanted:
                ticket.cancel("stop", wanted)
                break
    return tokens, ticket.usage.completion_tokens


@pytest.mark.parametrize("offset", range(1, 14))
def test_pitfall_07_stop_strings_with_several_tokens_a_step(offset: int) -> None:
    """Tokens, usage and what the next turn takes over end at the same token, with and without drafts.

    What an engine with five drafts a step can spare at least is ten positions.
    """

    async def main(drafts: int) -> tuple[list[int], int, int]:
        engine = ToyEngine(pages=200, max_drafts=5, spare=10)
        async with serving(engine, drafts=drafts) as node:
            tokens, counted = await read_to_stop(node, "a", offset)
            await node.rest()
            reply = await node.run(make_turn("b", [*PROMPT, *tokens, 7, 7, 7]))
            return tokens, counted, reply.usage.cached_tokens

    plain, drafted = (run_virtually(partial(main, drafts)) for drafts in (0, 5))
    assert plain == drafted
    assert plain[1:] == (offset, len(PROMPT) + offset)


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
RULES = [
    {
        "match": f"steps of {size},",
        "reply": " ".join([*WORDS, "and so on"] * 3),
        "tokens_per_step": size,
        "step_s": 0.001,
    }
    for size in (1, 4, 6)
]


async def ask(node: RealNode, content: Sequence[str], **fields: Any) -> Any:
    """The reply to a conversation whose messages are a user's and an assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(content)]
    client = await Client.connect(node)
    try:
        await client.ask("", messages=messages, stream=False, **fields)
        status, _, reply = await client.read_reply()
        assert status == 200, reply
        return reply
    finally:
        client.close()


async def test_pitfall_07_a_stop_string_at_each_offset_of_a_step(model_dir: Path, tmp_path: Path) -> None:
    """Text, reason, usage, and what the next turn of the conversation takes over, are the same for all steps."""
    async with running(model_dir, write_script(tmp_path, RULES)) as node:
        for stop in WORDS[1:]:
            ends = []
            for size in (1, 4, 6):
                said = [f"steps of {size}, please; stop at {stop}"]
                reply = await ask(node, said, stop=f" {stop}")
                [choice] = reply["choices"]
                await until(lambda: not node.sessions.counters()["copies"])
                again = await ask(node, [*said, choice["message"]["content"], "go on"], max_tokens=1)
                usage, reused = reply["usage"], again["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert choice["message"]["content"] == " ".join(WORDS[: WORDS.index(stop)])
                assert choice["finish_reason"] == "stop"
                assert reused >= usage["prompt_tokens"] + usage["completion_tokens"] - 5, "all but the stop string"
                ends.append((usage["completion_tokens"], reused))
            assert len(set(ends)) == 1, (stop, ends)


RIGHT = {"noise": [0], "truth": [5], "mixture": [0, 3, 5, 1, 4, 2, 5, 5, 0]}


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("depth", [n if n == 5 else pytest.param(n, marks=pytest.mark.full) for n in range(1, 6)])
def test_pitfall_08_drafting_that_changes_the_answer(oracle: Oracle, kind: str, depth: int) -> None:
    """Right and wrong drafts, across ends of groups, windows and pages, also right behind what was taken over."""

    async def scenario(node: Node) -> None:
        said = list(TEXT[:121])
        for number, wanted in enumerate((24, 17)):
            turn = say(str(number), said, max_tokens=wanted)
            expected = oracle.run(turn).tokens
            node.engine.drafter = Planned(expected, len(said), RIGHT[kind], oracle.model.config.vocab_size)
            reply = await node.run(turn)
            assert reply.tokens == expected
            said += [*expected, *TEXT[300:303]]
        assert reply.usage.cached_tokens >= 121 + 23
        drafted, kept = (node.read_metric(f"dsuf_draft_{name}_total") for name in ("tokens", "accepted_tokens"))
        assert {"noise": kept == 0, "truth": kept > drafted / 2, "mixture": 0 < kept < drafted}[kind], (kept, drafted)

    run(oracle, scenario, drafts=depth)


@pytest.mark.parametrize("offset", [7, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3, 4, 5, 6, 8, 9))])
def test_pitfall_07_the_state_behind_a_stop_can_be_cut_back_to_it(oracle: Oracle, offset: int) -> None:
    """Even if every draft is right, so that a step goes past the stop as far as it can."""

    async def scenario(node: Node) -> None:
        turn = say("a", TEXT[:121], max_tokens=40)
        node.engine.drafter = Planned(oracle.run(turn).tokens, 121, [5], oracle.model.config.vocab_size)
        ticket = node.scheduler.submit(turn)
        tokens: list[int] = []
        async for result in ticket:
            tokens += result.ids
            if len(tokens) >= offset:
                ticket.cancel("stop", offset)
        await node.rest()
        following = say("b", TEXT[:121], tokens[:offset], TEXT[300:303], max_tokens=6)
        reply = await node.run(following)
        check_cold(oracle, [following], [reply.tokens])
        assert reply.usage.cached_tokens == 121 + offset

    run(oracle, scenario, drafts=5)


STAGES = ("queued", "filling", "prefilling", "decoding")


def slow_write(call: str) -> float:
    """Copying a cache in takes long."""
    return 0.05 if call == "write_pages" else 0.0


async def reach(node: Node, ticket: TurnTicket, stage: str) -> None:
    """Wait until a turn is at `stage`."""
    held = node.scheduler._places
    for _ in range(100_000):
        at = held.get(ticket.turn.id)
        if {
            "queued": at is None, "filling": at is not None and at.filling,
            "prefilling": at is not None and 0 < at.done_tokens < 64, "decoding": len(ticket.ids) > 2,
        }[stage]:  # fmt: skip
            return
        await asyncio.sleep(0.0001)
    raise AssertionError(f"never {stage}")


@pytest.mark.parametrize("replay_tokens", [0, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_pitfall_16_clients_that_leave(stage: str, replay_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two steps later nothing of the turn is left, nobody else was disturbed, nothing is logged as an error, and the
    retry that follows goes on from what was computed."""
    prompt = list(range(1, 65))

    async def main() -> None:
        engine = ToyEngine(pages=60, max_turns=1 if stage == "queued" else 2, replay_tokens=replay_tokens)
        engine.step_s = lambda plan: 0.001
        async with serving(engine, chunk_tokens=8) as node:
            await node.run(make_turn("before", prompt[:20], max_tokens=1))
            await node.forget_device()
            engine.before = slow_write
            other = make_turn("other", range(200, 210), max_tokens=200)
            company = asyncio.create_task(node.run(other))
            await until(lambda: len(node.scheduler._places) > 0)
            ticket = node.scheduler.submit(make_turn("leaves", prompt, max_tokens=30))
            await reach(node, ticket, stage)
            ticket.cancel()
            engine.before = lambda call: 0.0
            await leave_behind(node)
            done = ticket.prefilled_tokens
            assert (await company).tokens == engine.cold_tokens(other)
            await node.rest()
            again = make_turn("again", [*prompt, 500], max_tokens=5)
            reply = await node.run(again)
            assert reply.tokens == engine.cold_tokens(again)
            assert reply.usage.cached_tokens >= min(done, len(prompt)) - 8 - replay_tokens
            assert reply.usage.cached_tokens >= (20 if stage in ("queued", "filling") else done // 2)

    with caplog.at_level(logging.WARNING):
        run_virtually(main)
    assert caplog.records == []


async def leave_behind(node: Node) -> None:
    """Let two steps pass, and the copy that was under way; of the turn that left nothing is in the engine."""
    steps = node.scheduler.steps
    await until(lambda: node.scheduler.steps >= steps + 2 and not any(held.filling for held in node.scheduler._places))
    await asyncio.sleep(0)
    assert node.scheduler.counters() == {"queued": 0, "attached": 1, "running": 1, "writing": 0}
    assert node.engine.counters() == {"turns": 1}


SLOW = [
    {"match": "thirsty", "reply": "word " * 50, "prefill_s_per_token": 0.0004, "step_s": 0.002},
    {"reply": "word " * 50},
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["fin", "half-close", "rst"])
async def test_pitfall_16_a_retry_goes_on_where_the_client_left(
    model_dir: Path, tmp_path: Path, way: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt is not computed again and again for a client that leaves each time."""
    text = "thirsty " * 900
    async with running(model_dir, write_script(tmp_path, SLOW), prefill_chunk_tokens=128) as node:
        scheduler, sessions = node.scheduler, node.sessions
        assert scheduler is not None and sessions is not None
        client = await Client.connect(node)
        await client.ask(text, stream=stream)
        await until(lambda: any(held.done_tokens > 600 for held in scheduler._places))
        done = max(held.done_tokens for held in scheduler._places)
        {"fin": client.close, "half-close": client.half_close, "rst": client.reset}[way]()
        await until(lambda: not any(scheduler.counters().values()))
        await until(lambda: not any(sessions.counters()[name] for name in ("turns", "copies", "pages_held", "leases")))
        assert node.engine is not None and set(node.engine.counters().values()) == {0}
        client.close()
        reply = await ask(node, [text], max_tokens=3)
        usage = reply["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= done - 256, "all but a page and a window"
        assert usage["prompt_tokens"] == sum(usage["prompt_tokens_details"][f"{name}_tokens"] for name in SOURCES)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


SOURCES = ("device", "host", "peer", "computed")

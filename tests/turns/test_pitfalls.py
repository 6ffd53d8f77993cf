"""Known pitfalls of other servers, each through scheduler, sessions and engine together."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsuf.node.node import Node as RealNode
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
@pytest.mark.parametrize("depth", [n if n in (2, 5) else pytest.param(n, marks=pytest.mark.full) for n in range(1, 6)])
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


@pytest.mark.parametrize("offset", [3, 7, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 4, 5, 6, 8, 9))])
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

"""What must be equal to what, through scheduler, sessions and the reference engine in exact mode.

Each test compares tokens and the bytes of the global cache with lone cold runs, 64 tokens on.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dsuf.types import Turn
from tests.toy import make_turn
from tests.turns.clock import run_virtually
from tests.turns.node import Node, serving
from tests.turns.reference import Oracle, WatchedReference, check_parts

FULL = pytest.mark.full
WANTED = 64
TEXT = tuple(np.random.default_rng(21).integers(3, 500, 340).tolist())
EDGES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 143, 144, 145, 255, 256, 257]
"""Lengths around multiples of 2, of the window (16) and of a page (128)."""
SHORT = {129}
LENGTHS = [n if n in SHORT else pytest.param(n, marks=FULL) for n in EDGES]


def run(
    oracle: Oracle, scenario: Callable[[Node], Awaitable[None]], *, drafts: int = 0, max_turns: int = 4,
    pages: int = 24, **options: Any,
) -> None:  # fmt: skip
    """Let `scenario` happen, then compare the caches of all turns that were in the engine."""

    async def main() -> None:
        engine = WatchedReference(oracle.model, oracle.drafter if drafts else None, pages, max_turns, "exact")
        async with serving(engine, drafts=drafts, **({"chunk_tokens": 50} | options)) as node:
            await scenario(node)
        assert check_parts(oracle, engine) > 0

    run_virtually(main)


def say(name: str, *parts: Sequence[int], max_tokens: int = WANTED, **options: Any) -> Turn:
    """A turn over the tokens of `parts`."""
    return make_turn(name, [token for part in parts for token in part], max_tokens=max_tokens, **options)


def check_cold(oracle: Oracle, turns: Sequence[Turn], tokens: Sequence[list[int]]) -> None:
    """Each turn gave what it gives alone."""
    for turn, got in zip(turns, tokens, strict=True):
        assert got == oracle.run(turn).tokens, turn.id


@pytest.mark.parametrize("drafts", [5, *(pytest.param(n, marks=FULL) for n in (1, 2, 3, 4))])
def test_drafts_change_nothing(oracle: Oracle, drafts: int) -> None:
    async def scenario(node: Node) -> None:
        turns = [say("a", TEXT[:150]), say("b", TEXT[:31]), say("c", TEXT[100:229])]
        replies = [await node.run(turn) for turn in turns]
        check_cold(oracle, turns, [reply.tokens for reply in replies])
        assert node.read_metric("dsuf_draft_tokens_total") > 0

    run(oracle, scenario, drafts=drafts)


@pytest.mark.full
@pytest.mark.parametrize("drafts", [0, 3])
def test_company_in_the_batch_changes_nothing(oracle: Oracle, drafts: int) -> None:
    async def scenario(node: Node) -> None:
        turns = [say(str(i), TEXT[i : i + n]) for i, n in enumerate((150, 31, 128, 65))]
        check_cold(oracle, turns, [reply.tokens for reply in await node.run_all(*turns)])

    run(oracle, scenario, drafts=drafts)


@pytest.mark.parametrize("chunk", [7, *(pytest.param(n, marks=FULL) for n in (1, 16, 33, 64, 128, 400))])
def test_chunks_change_nothing(oracle: Oracle, chunk: int) -> None:
    async def scenario(node: Node) -> None:
        turn = say("a", TEXT[:150])
        check_cold(oracle, [turn], [(await node.run(turn)).tokens])

    run(oracle, scenario, chunk_tokens=chunk)


@pytest.mark.parametrize("drafts", [0, pytest.param(5, marks=FULL)])
@pytest.mark.parametrize("source", ["device", "host"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_hit_at_the_end_of_a_prompt_changes_nothing(oracle: Oracle, length: int, source: str, drafts: int) -> None:
    async def scenario(node: Node) -> None:
        await node.run(say("first", TEXT[:length], max_tokens=1))
        if source == "host":
            await node.forget_device()
        turn = say("next", TEXT[:length], TEXT[300:309])
        reply = await node.run(turn)
        check_cold(oracle, [turn], [reply.tokens])
        assert reply.usage.cached_tokens == length
        assert reply.usage.device_tokens == (length // 128 * 128 if source == "device" else 0)

    run(oracle, scenario, drafts=drafts)


@pytest.mark.parametrize("source", [pytest.param("device", marks=FULL), "host"])
@pytest.mark.parametrize("chunk", [50, *(pytest.param(n, marks=FULL) for n in (16, 31, 64, 128))])
def test_a_hit_at_a_chunk_end_changes_nothing(oracle: Oracle, chunk: int, source: str) -> None:
    """The prompts part ways somewhere; what is taken over ends at a chunk end before that."""

    async def scenario(node: Node) -> None:
        await node.run(say("first", TEXT[:200], max_tokens=1))
        for number, shared in enumerate((chunk + 3, 120, 199)):
            await (node.forget_device() if source == "host" else node.rest())
            turn = say(f"next{number}", TEXT[:shared], TEXT[300:307], max_tokens=WANTED if shared == 120 else 9)
            reply = await node.run(turn)
            check_cold(oracle, [turn], [reply.tokens])
            assert reply.usage.cached_tokens >= (chunk if shared >= chunk else 0)

    run(oracle, scenario, chunk_tokens=chunk)


@pytest.mark.parametrize(
    ("source", "drafts"),
    [("device", 0), *(pytest.param(*p, marks=FULL) for p in (("device", 5), ("host", 0), ("host", 5)))],
)
def test_a_hit_at_the_end_of_a_turn_changes_nothing(oracle: Oracle, source: str, drafts: int) -> None:
    """A conversation: each turn goes on from the end of the one before."""

    async def scenario(node: Node) -> None:
        said: list[int] = list(TEXT[:49])
        for number, wanted in enumerate((13, 64, 2, 30)):
            turn = say(str(number), said, max_tokens=wanted)
            reply = await node.run(turn)
            check_cold(oracle, [turn], [reply.tokens])
            assert len(said) - reply.usage.cached_tokens <= 6 or not number, "its own tokens and the last of the reply"
            said += [*reply.tokens, *TEXT[300 + number : 305 + number]]
            if source == "host":
                await node.forget_device()

    run(oracle, scenario, drafts=drafts)


def test_turns_that_share_pages_at_the_same_time_change_nothing(oracle: Oracle) -> None:
    async def scenario(node: Node) -> None:
        await node.run(say("first", TEXT[:260], max_tokens=1))
        turns = [say(str(i), TEXT[:260], TEXT[300 + i : 305 + 2 * i], max_tokens=20) for i in range(4)]
        replies = await node.run_all(*turns)
        check_cold(oracle, turns, [reply.tokens for reply in replies])
        assert [reply.usage.device_tokens for reply in replies] == [256] * 4

    run(oracle, scenario, pages=12)


@pytest.mark.full
def test_eviction_and_return_change_nothing(oracle: Oracle) -> None:
    """What had to go is computed again, and what came back is found again."""

    async def scenario(node: Node) -> None:
        cached = []
        for number in range(3):
            again = [say(f"{name}{number}", TEXT[:140], max_tokens=10) for name in "ab"]
            replies = [await node.run(turn) for turn in again]
            cached.append([reply.usage.cached_tokens for reply in replies])
            check_cold(oracle, again, [reply.tokens for reply in replies])
            for other in range(3):
                turn = say(f"{number}-{other}", TEXT[40 * other + number + 1 :][:200], max_tokens=2)
                check_cold(oracle, [turn], [(await node.run(turn)).tokens])
        assert cached == [[0, 139]] * 3
        assert node.read_metric("dsuf_session_cache_evictions_total") > 0

    run(oracle, scenario, pages=4, blocks=10)


@pytest.mark.full
@pytest.mark.parametrize("drafts", [5, pytest.param(0, marks=FULL)])
def test_preemption_changes_nothing(oracle: Oracle, drafts: int) -> None:
    """A turn is put back several times, in its prompt and in its answer."""

    async def scenario(node: Node) -> None:
        low = say("low", TEXT[:180], priority=1)
        ticket = node.scheduler.submit(low)
        tokens: list[int] = []
        number = 0
        async for result in ticket:
            tokens += result.ids
            if number < 5 and len(tokens) >= 12 * number - 12:
                high = say(f"high{number}", TEXT[number : number + 9], max_tokens=2)
                check_cold(oracle, [high], [(await node.run(high)).tokens])
                number += 1
        check_cold(oracle, [low], [tokens])
        assert ticket.usage.prompt_tokens == 180 and ticket.usage.completion_tokens == WANTED
        assert node.read_metric("dsuf_preemptions_total") >= 3

    run(oracle, scenario, max_turns=1, drafts=drafts, pages=4)


@pytest.mark.parametrize("length", [129, *(pytest.param(n, marks=FULL) for n in (17, 128, 143, 256, 300))])
@pytest.mark.parametrize("drafts", [0, pytest.param(5, marks=FULL)])
def test_a_hand_off_changes_nothing(oracle: Oracle, length: int, drafts: int) -> None:
    """One node computes the prompt, another one answers; then the conversation goes on there."""

    async def main() -> None:
        drafter = oracle.drafter if drafts else None
        far, near = (WatchedReference(oracle.model, drafter, 24, 4, "exact") for _ in range(2))
        async with serving(far, chunk_tokens=50, role="prefill", drafts=drafts) as prefill:
            options = {"chunk_tokens": 50, "role": "decode", "drafts": drafts}
            async with serving(near, giver=prefill.giver, **options) as decode:
                turn = say("a", TEXT[:length])
                reply = await decode.run(turn)
                following = say("b", TEXT[:length], reply.tokens, TEXT[300:303], max_tokens=9)
                next_reply = await decode.run(following)
        check_cold(oracle, [turn, following], [reply.tokens, next_reply.tokens])
        assert reply.usage.peer_tokens == (length - 1 if length > 128 else 0)
        assert next_reply.usage.cached_tokens >= length + WANTED - 1
        assert check_parts(oracle, near) == 2 and check_parts(oracle, far) == (length > 128)

    run_virtually(main)

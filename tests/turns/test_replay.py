"""Replay mode through the scheduler: a turn is a run with the same replay points, wherever its pages come from; and how
much of a prompt is taken over.

Oracles make the same replays by other means, see tests/reference.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from dsuf.reference.model import Model
from dsuf.types import Turn
from tests.reference.test_resume import run_model
from tests.reference.test_window_replay import continue_greedily, run_oracle
from tests.toy import ToyEngine, make_turn
from tests.turns.clock import run_virtually
from tests.turns.node import Node, serving
from tests.turns.reference import Oracle, WatchedReference

FULL = pytest.mark.full
TEXT = np.random.default_rng(21).integers(3, 500, 340)
PROMPT = TEXT[:150]
WINDOW = 16


def run(
    oracle: Oracle,
    scenario: Callable[[Node], Awaitable[Any]],
    *,
    drafts: int = 0,
    chunk_tokens: int = 50,
    max_turns: int = 4,
    points: int = 40,
) -> Any:
    """What `scenario` gives on a node in replay mode, with host memory for so many commit points of short turns."""

    async def main() -> Any:
        engine = WatchedReference(oracle.model, oracle.drafter if drafts else None, 24, max_turns, "replay")
        blocks = points * (3 - -engine.layout.state_bytes // engine.layout.page_bytes)
        async with serving(
            engine, drafts=drafts, chunk_tokens=chunk_tokens, audit_share=1.0, blocks=blocks
        ) as node:  # fmt: skip
            return await scenario(node)

    return run_virtually(main)


def say(name: str, ids: Any, max_tokens: int = 24) -> Turn:
    """A turn over `ids`."""
    return make_turn(name, np.asarray(ids).tolist(), max_tokens=max_tokens)


@pytest.mark.parametrize("drafts", [0, pytest.param(5, marks=FULL)])
@pytest.mark.parametrize("source", ["device", "host"])
@pytest.mark.parametrize("chunk", [50, pytest.param(7, marks=FULL), pytest.param(400, marks=FULL)])
def test_a_conversation_is_a_run_with_the_same_replays(oracle: Oracle, chunk: int, source: str, drafts: int) -> None:
    """Each turn goes on exactly from the end of the one before; its own tokens are replayed."""

    async def scenario(node: Node) -> tuple[list[int], list[int]]:
        first = await node.run(say("a", PROMPT[:33], 10))
        if source == "host":
            await node.forget_device()
        following = [*PROMPT[:33], *first.tokens[:9], *TEXT[100:130]]
        second = await node.run(say("b", following))
        assert second.usage.cached_tokens == 42
        return first.tokens, second.tokens

    first, second = run(oracle, scenario, drafts=drafts, chunk_tokens=chunk)
    same = run_model(oracle.model, PROMPT[:33], np.array(first[:9]), TEXT[100:130])
    assert second == same.argmax(axis=1).tolist()


@pytest.mark.parametrize("drafts", [0, pytest.param(5, marks=FULL)])
@pytest.mark.parametrize("source", [pytest.param("device", marks=FULL), "host"])
@pytest.mark.parametrize("chunk", [50, pytest.param(7, marks=FULL), pytest.param(400, marks=FULL)])
def test_a_hit_between_commit_points_is_a_run_with_windows_cut_there(
    oracle: Oracle, model: Model, chunk: int, source: str, drafts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole page of another prompt is taken over but for a window, which is computed again."""

    async def scenario(node: Node) -> list[int]:
        await node.run(say("a", [*PROMPT[:140], *TEXT[300:310]], 1))
        if source == "host":
            await node.forget_device()
        reply = await node.run(say("b", PROMPT, 64))
        assert reply.usage.cached_tokens == 128 - WINDOW
        return reply.tokens

    tokens = run(oracle, scenario, drafts=drafts, chunk_tokens=chunk)
    cache = model.new_cache()
    model.prefill_replay(cache, np.concatenate([PROMPT[:140], TEXT[300:310]]), last=True)
    logits, same = run_oracle(model, PROMPT, cache, 128)
    assert tokens == continue_greedily(model, same, logits)
    cold = run(oracle, lambda node: node.run(say("cold", PROMPT, 64))).tokens
    exact = oracle.run(say("exact", PROMPT, 64)).tokens
    with capsys.disabled():
        print(f"\nof 64 tokens behind a replayed window {_count_same(tokens, cold)} are those of a cold replayed run, "
              f"{_count_same(tokens, exact)} those of a cold exact one (random weights)")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("source", ["device", "host"])
@pytest.mark.parametrize(("chunk", "drafts"), [(50, 0), *(pytest.param(*p, marks=FULL) for p in ((7, 5), (400, 0)))])
def test_a_prompt_that_ends_otherwise_goes_on_from_the_end_of_the_one_before(
    oracle: Oracle, model: Model, chunk: int, drafts: int, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a client drops the thinking of earlier turns: all that is shared is reused, windows begin as they did.
    An audit begins there too."""
    following = [*PROMPT[:69], *TEXT[200:230]]

    async def scenario(node: Node) -> list[int]:
        await node.run(say("a", PROMPT[:70], 10))
        await (node.forget_device() if source == "host" else node.rest())
        reply = await node.run(say("b", following, 64))
        assert reply.usage.cached_tokens == 69
        if drafts:
            await asyncio.sleep(10)
            assert node.read_metric('dsuf_speculation_audits_total{result="same"}') == 2
        return reply.tokens

    tokens = run(oracle, scenario, drafts=drafts, chunk_tokens=chunk)
    cache = model.new_cache()
    model.prefill_replay(cache, PROMPT[:70], last=True)
    cache.truncate(69)
    output = model.prefill_replay(cache, np.array(following[69:]), last=True)
    assert output is not None
    assert tokens == continue_greedily(model, cache, model.logits(output, slice(-1, None))[0])
    exact = oracle.run(say("exact", following, 64)).tokens
    with capsys.disabled():
        print(f"\nof 64 tokens behind a prompt that ended otherwise {_count_same(tokens, exact)} are those of a cold "
              "exact run (random weights)")  # fmt: skip


def test_more_than_the_end_of_a_prompt_is_not_cut_from_its_state(oracle: Oracle) -> None:
    """Windows would begin too late."""

    async def scenario(node: Node) -> None:
        await node.run(say("a", PROMPT[:70], 10))
        await node.rest()
        assert (await node.run(say("b", [*PROMPT[:68], *TEXT[200:230]], 2))).usage.cached_tokens == 0

    run(oracle, scenario)


def _count_same(a: list[int], b: list[int]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def measure_reuse(shared: int, replay_tokens: int, *, chunk: int = 16, page_tokens: int = 8) -> int:
    """Tokens that a prompt takes over from another one of 120 tokens, of which it shares the first `shared`."""

    async def main() -> int:
        engine = ToyEngine(replay_tokens=replay_tokens, page_tokens=page_tokens, spare=3)
        async with serving(engine, chunk_tokens=chunk) as node:
            await node.run(make_turn("a", range(1, 121), max_tokens=4))
            await node.rest()
            turn = make_turn("b", [*range(1, shared + 1), *range(500, 510)])
            reply = await node.run(turn)
            assert reply.tokens == engine.cold_tokens(turn)
            return reply.usage.cached_tokens

    reused = run_virtually(main)
    assert isinstance(reused, int)
    return reused


@pytest.mark.parametrize("replay_tokens", [0, 6, 8])
def test_pitfall_11_what_is_reused_rises_with_what_is_shared(replay_tokens: int) -> None:
    """In replay mode all but a begun page and a window is; in exact mode what is before the last commit point, each of
    which is at most half as long again as the one before, and a chunk."""
    reused = [measure_reuse(shared, replay_tokens) for shared in range(121)]
    assert reused == sorted(reused)
    for shared, count in enumerate(reused):
        assert count <= shared
        least = shared - 7 - replay_tokens if replay_tokens else shared / 1.5 - 16
        assert count >= least, (shared, count)
    assert reused[120] == 120 and len(set(reused)) > 5


@pytest.mark.parametrize("drafts", [0, pytest.param(5, marks=FULL)])
@pytest.mark.parametrize(
    "trouble", ["crowded", *(pytest.param(one, marks=FULL) for one in ("", "no room", "flushed", "late"))]
)
def test_a_turn_that_is_put_back_goes_on_as_if_it_had_not_been(oracle: Oracle, drafts: int, trouble: str) -> None:
    """It goes on exactly where it was, whatever becomes of all else that is kept: nothing that it decoded is replayed.
    Where its state cannot be kept it is not put back."""

    async def scenario(node: Node, others: int) -> list[int]:
        if trouble == "late":
            node.engine.before = lambda call: 6.0 if call == "read_state" else 0.0
        low = msgspec.structs.replace(say("low", PROMPT[:70], 40), priority=1)
        ticket = node.scheduler.submit(low)
        tokens: list[int] = []
        came = 0
        async for result in ticket:
            tokens += result.ids
            if came < others and len(tokens) >= 6 * came:
                came += 1
                high = [say(f"high{came}{i}", TEXT[150 + 9 * came + 3 * i : 280], 2) for i in range(3)]
                await node.run(high[0])
                if trouble == "flushed":
                    node.sessions.flush()
                await node.run_all(*high[1:])
        put_back = node.read_metric("dsuf_preemptions_total")
        assert put_back == 0 if trouble in ("no room", "late") else put_back >= others - 1
        return tokens

    points = {"no room": 0, "crowded": 2}.get(trouble, 40)
    alone, disturbed = (
        run(oracle, partial(scenario, others=others), drafts=drafts, max_turns=1, points=points) for others in (0, 4)
    )
    assert alone == disturbed

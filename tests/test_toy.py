"""The toy engine itself: cold is cold however it is cut up, and each kind of wrong cache changes the tokens."""

import asyncio
import random

import pytest

from dsuf.errors import CheckpointError
from dsuf.types import PrefillRange, SessionState, StepPlan
from tests.toy import EOS, WINDOW, ToyEngine, make_turn

IDS = tuple(range(100, 137))


def run(engine: ToyEngine, name: str, start: int, stop: int, *, chunk: int = 100, drafts: int = 0) -> list[int]:
    """Prefill from `start` to `stop` by `chunk`, then decode to the end."""
    ids: list[int] = []
    for first in range(start, stop, chunk):
        [result] = engine.compute(StepPlan(prefill=(PrefillRange(name, first, min(stop, first + chunk)),)))
        ids += result.ids
    while result.finish is None:
        [result] = engine.compute(StepPlan(decode=(name,), drafts=drafts))
        ids += result.ids
    return ids


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_hang_on_neither_chunks_nor_drafts_nor_pages(chunk: int, drafts: int, temperature: float) -> None:
    engine = ToyEngine(stop_every=50)
    turn = make_turn("a", IDS, max_tokens=30, temperature=temperature)
    pages = random.Random(chunk).sample(range(64), 10)
    engine.attach(turn, pages)
    assert run(engine, "a", 0, len(IDS), chunk=chunk, drafts=drafts) == engine.cold_tokens(turn)
    assert engine.violations == []


def test_replies_end_by_both_ways() -> None:
    engine = ToyEngine(stop_every=20)
    replies = [engine.cold_tokens(make_turn("a", (*IDS, n), max_tokens=20)) for n in range(40)]
    assert any(len(reply) < 20 for reply in replies)
    assert any(len(reply) == 20 for reply in replies)
    assert all(EOS not in reply for reply in replies)


@pytest.mark.parametrize("length", range(1, len(IDS)))
@pytest.mark.parametrize("replay", [0, WINDOW])
@pytest.mark.parametrize("less", [0, 2])
async def test_resumed_with_a_state_is_as_cold(length: int, replay: int, less: int) -> None:
    engine = ToyEngine(replay_tokens=replay)
    first, turn = make_turn("a", IDS[:length], max_tokens=1), make_turn("b", IDS)
    engine.attach(first, range(10))
    engine.compute(StepPlan(prefill=(PrefillRange("a", 0, length),)))
    state = await engine.read_state("a")
    assert state is not None
    assert state.length == length
    engine.detach("a")
    engine.attach(turn, range(10))
    less = min(less, state.spare, length - 1)
    assert await engine.resume("b", length - less, state) == length - less
    assert run(engine, "b", length - less, len(IDS), chunk=5) == engine.cold_tokens(turn)


@pytest.mark.parametrize("length", range(1, len(IDS) + 1))
async def test_resumed_by_replay_is_as_cold_and_rewrites_nothing(length: int) -> None:
    engine = ToyEngine(replay_tokens=WINDOW + 1)
    turn = make_turn("b", IDS)
    engine.attach(make_turn("a", IDS[:length], max_tokens=1), range(10))
    engine.compute(StepPlan(prefill=(PrefillRange("a", 0, length),)))
    engine.detach("a")
    engine.attach(turn, range(10))
    start = await engine.resume("b", length, None)
    assert start == max(0, length - WINDOW - 1)
    before = bytes(engine.memory)
    if start < length < len(IDS):
        engine.compute(StepPlan(prefill=(PrefillRange("b", start, length),)))
        start = length
    assert bytes(engine.memory) == before
    assert run(engine, "b", start, len(IDS)) == engine.cold_tokens(turn)


async def test_a_wrong_byte_or_a_wrong_state_changes_the_tokens() -> None:
    engine = ToyEngine()
    turn = make_turn("b", IDS)
    engine.attach(make_turn("a", IDS[:30], max_tokens=1), range(10))
    engine.compute(StepPlan(prefill=(PrefillRange("a", 0, 30),)))
    state = await engine.read_state("a")
    assert state is not None
    engine.detach("a")
    rows = {(page, byte) for page in range(3) for byte in (0, 63, 64, 95)} | {(3, 0), (3, 47), (3, 64), (3, 87)}
    for page, byte in rows:
        engine.memory[page * 96 + byte] ^= 1
        engine.attach(turn, range(10))
        await engine.resume("b", 30, state)
        assert run(engine, "b", 30, len(IDS)) != engine.cold_tokens(turn), (page, byte)
        engine.detach("b")
        engine.memory[page * 96 + byte] ^= 1
    flipped = state.payload[:-1] + bytes([state.payload[-1] ^ 1])
    other = SessionState(fingerprint=state.fingerprint, length=30, ids=state.ids, payload=flipped)
    engine.attach(turn, range(10))
    with pytest.raises(CheckpointError):
        await engine.resume("b", 29, other)
    await engine.resume("b", 30, other)
    assert run(engine, "b", 30, len(IDS)) != engine.cold_tokens(turn)
    engine.detach("b")
    engine.attach(make_turn("c", (*IDS[:29], 7, 7)), range(10))
    with pytest.raises(CheckpointError):
        await engine.resume("c", 30, state)


async def test_calls_take_effect_in_their_order_also_those_given_up() -> None:
    engine = ToyEngine()
    engine.before = lambda name: {"write_pages": 0.02, "step": 0.0}.get(name, 0.0)
    turn = make_turn("a", IDS[:8], max_tokens=3)
    engine.attach(turn, range(4))
    rows = memoryview(bytes(range(96)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await engine.write_pages([0], [rows])
    prefill = asyncio.ensure_future(engine.step(StepPlan(prefill=(PrefillRange("a", 0, 8),))))
    state = asyncio.ensure_future(engine.read_state("a"))
    decode = asyncio.ensure_future(engine.step(StepPlan(decode=("a",))))
    late = asyncio.ensure_future(engine.step(StepPlan(decode=("a",), drafts=2)))
    idle = asyncio.ensure_future(engine.step(StepPlan(decode=("a",))))
    results = [result for step in (prefill, decode, late, idle) for result in await step]
    kept = await state
    assert kept is not None
    assert kept.length == 8, "as the steps before it leave the turn, not those behind it"
    assert [token for result in results for token in result.ids] == engine.cold_tokens(turn)
    assert await idle == []


def test_shared_rows_that_are_written_are_reported() -> None:
    engine = ToyEngine()
    engine.attach(make_turn("a", IDS[:8], max_tokens=3), range(4))
    engine.attach(make_turn("b", IDS[:8], max_tokens=3), range(4))
    engine.compute(StepPlan(prefill=(PrefillRange("a", 0, 8),)))
    assert len(engine.violations) == 8

"""A turn that goes on from a state makes the tokens and the cache bytes of one that computed everything.

In `exact` mode that is a cold run. Behind a replayed prefill it is a run that replayed at the same lengths.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsuf.errors import CheckpointError, ContextTooLong, EngineFailed
from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model, PrefillMode
from dsuf.reference.speculate import HeadDrafter
from dsuf.types import PrefillRange, SessionState, StepPlan, Turn
from tests.reference.rig import attach, decode, global_bytes, make_turn, prefill, take_over

WANTED = 64
PROMPT = 150
FULL = pytest.mark.full
EDGES = [n for n in range(1, PROMPT) if n < 20 or n % 16 in (15, 0, 1) or n in (126, 130)]
"""Lengths around multiples of 2, 16 (the window) and 128 (a page)."""
SHORT = {(1, 4), (2, 0), (16, 0), (33, 4), (127, 0), (128, 4), (129, 0), (129, 4), (144, 0)}


@pytest.fixture(scope="module")
def head(small_checkpoint: Path, model: Model) -> HeadDrafter:
    return HeadDrafter(load_draft(small_checkpoint, model))


def make_engine(model: Model, mode: PrefillMode = "exact", head: HeadDrafter | None = None) -> ReferenceEngine:
    engine = ReferenceEngine(model, "reference", "test", context_tokens=400, max_turns=4, prefill=mode, drafter=head)
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=-1)  # replies are as long as they may be
    engine.pool.pages[:] = np.random.default_rng(9).integers(0, 256, engine.pool.pages.shape)
    return engine


def run_cold(engine: ReferenceEngine, turn: Turn, drafts: int = 0) -> tuple[list[int], bytes]:
    attach(engine, turn)
    try:
        return prefill(engine, turn) + decode(engine, turn, drafts), global_bytes(engine, turn)
    finally:
        engine.detach(turn.id)


async def run_from(
    engine: ReferenceEngine, source: Turn, turn: Turn, length: int, state: SessionState | None, drafts: int = 0
) -> tuple[list[int], bytes]:
    start = await take_over(engine, source, turn, length, state)
    assert start == length or state is None
    return prefill(engine, turn, start) + decode(engine, turn, drafts), global_bytes(engine, turn)


async def keep(engine: ReferenceEngine, turn: Turn, stop: int = 0, chunk: int = 400) -> SessionState:
    """Compute the first `stop` positions of `turn` (0: all), and the state behind them."""
    attach(engine, turn)
    prefill(engine, turn, 0, stop, chunk)
    state = await engine.read_state(turn.id)
    assert state is not None
    assert len(state.payload) <= engine.layout.state_bytes
    return state


def written_ids(state: SessionState) -> I64:
    return np.frombuffer(state.ids, np.int64)


@pytest.fixture(scope="module")
def cold(model: Model, ids: I64) -> tuple[list[int], bytes]:
    return run_cold(make_engine(model), make_turn("a", ids[:PROMPT], WANTED))


@pytest.mark.parametrize(
    ("length", "drafts"),
    [pytest.param(n, k, marks=[] if (n, k) in SHORT else FULL) for n in EDGES for k in (0, 4)],
)
async def test_resumed_at_any_length(
    model: Model, ids: I64, head: HeadDrafter, cold: tuple[list[int], bytes], length: int, drafts: int
) -> None:
    engine, first = make_engine(model, head=head), make_turn("a", ids[:PROMPT], WANTED)
    state = await keep(engine, first, length)
    assert state.length == length
    assert await run_from(engine, first, make_turn("b", ids[:PROMPT], WANTED), length, state, drafts) == cold


@pytest.mark.parametrize("chunk", [13, pytest.param(50, marks=FULL), pytest.param(64, marks=FULL)])
async def test_resumed_at_every_chunk_end_by_turns_that_run_together(
    model: Model, ids: I64, cold: tuple[list[int], bytes], chunk: int
) -> None:
    """Each goes on from the one before while that one goes on too, whole pages shared by all."""
    engine, turns = make_engine(model), [make_turn(name, ids[:PROMPT], WANTED) for name in "abcd"]
    attach(engine, turns[0])
    ends, replies = [chunk, 2 * chunk, PROMPT - 1], {turn.id: list[int]() for turn in turns}
    start = 0
    for i, stop in enumerate(ends):
        prefill(engine, turns[i], start, stop)
        start = await take_over(engine, turns[i], turns[i + 1], stop, await engine.read_state(turns[i].id))
    for turn, length in zip(turns, (*ends, PROMPT - 1), strict=True):
        replies[turn.id] += prefill(engine, turn, length)
    while results := engine.run(StepPlan(decode=tuple(replies))):
        for result in results:
            replies[result.turn] += result.ids
    assert [(replies[turn.id], global_bytes(engine, turn)) for turn in turns] == [cold] * 4


@pytest.mark.parametrize(
    ("length", "less"),
    [
        (length, less) if (length + less) % 24 == 4 else pytest.param(length, less, marks=FULL)
        for length in (33, 48, 129, 140)
        for less in range(1, 17)
    ],
)
async def test_the_last_positions_can_be_left_off(model: Model, ids: I64, length: int, less: int) -> None:
    """Pitfall 11: what the prompts share is used, even if it ends before the state does."""
    engine, first = make_engine(model), make_turn("a", ids[:length])
    state = await keep(engine, first)
    assert state.spare >= less
    other = make_turn("b", np.concatenate([ids[: length - less], ids[100:109]]), 24)
    assert await run_from(engine, first, other, length - less, state) == run_cold(make_engine(model), other)


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("length", [49, pytest.param(16, marks=FULL), pytest.param(129, marks=FULL)])
async def test_the_same_prompt_again_computes_its_last_token(
    model: Model, ids: I64, mode: PrefillMode, length: int
) -> None:
    engine, first = make_engine(model, mode), make_turn("a", ids[:length], 24)
    state = await keep(engine, first)
    assert state.repeats
    again = make_turn("b", ids[:length], 24)
    assert await run_from(engine, first, again, length - 1, state) == run_cold(make_engine(model, mode), again)


@pytest.mark.parametrize(
    ("drafts", "max_tokens"), [(0, 1), (5, 19), pytest.param(0, 2, marks=FULL), pytest.param(3, 20, marks=FULL)]
)
@pytest.mark.parametrize("prompt", [40, pytest.param(115, marks=FULL)])
async def test_the_end_of_a_turn_by_length(
    model: Model, ids: I64, head: HeadDrafter, prompt: int, drafts: int, max_tokens: int
) -> None:
    engine, first = make_engine(model, head=head), make_turn("a", ids[:prompt], max_tokens)
    attach(engine, first)
    reply = prefill(engine, first) + decode(engine, first, drafts)
    state = await engine.read_state("a")
    assert state is not None
    assert state.length in (prompt + max_tokens - 1, prompt + max_tokens), "the last token may not be fed yet"
    following = make_turn("b", np.concatenate([ids[:prompt], reply, ids[120:131]]), WANTED)
    expected = run_cold(make_engine(model), following)
    assert await run_from(engine, first, following, state.length, state, drafts) == expected


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=FULL), 5])
async def test_the_end_of_a_turn_by_the_end_of_sentence(model: Model, ids: I64, head: HeadDrafter, drafts: int) -> None:
    engine, first = make_engine(model, head=head), make_turn("a", ids[:41], WANTED)
    eos = run_cold(engine, first)[0][17]
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=eos)
    attach(engine, first)
    reply = prefill(engine, first) + decode(engine, first, drafts)
    state = await engine.read_state("a")
    assert state is not None
    assert state.length == 41 + len(reply), "every token that was handed out, the end-of-sentence token is not fed"
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=-1)
    following = make_turn("b", np.concatenate([ids[:41], reply, [eos], ids[120:131]]), 24)
    expected = run_cold(make_engine(model), following)
    assert await run_from(engine, first, following, state.length, state, drafts) == expected


async def test_what_drafts_wrote_beyond_the_end_is_not_spared(model: Model, ids: I64, head: HeadDrafter) -> None:
    """Rejected rows took the places of the oldest ones, so fewer positions can be left off."""
    engine, first = make_engine(model, head=head), make_turn("a", ids[:40], 24)
    attach(engine, first)
    prefill(engine, first)
    engine.run(StepPlan(decode=("a",), drafts=5))
    state = await engine.read_state("a")
    assert state is not None
    written = 46 - state.length
    assert written > 0
    assert state.spare == 16 - written
    length = state.length - state.spare
    other = make_turn("b", np.concatenate([written_ids(state)[:length], ids[100:109]]), 24)
    assert await run_from(engine, first, other, length, state) == run_cold(make_engine(model), other)


@pytest.mark.parametrize("mode", ["exact", pytest.param("replay", marks=FULL)])
async def test_a_seeded_reply_with_drafts_is_as_cold(
    model: Model, ids: I64, head: HeadDrafter, mode: PrefillMode
) -> None:
    """Its tokens hang on the drafts too, hence on the draft head's rows."""
    engine, first = make_engine(model, mode, head), make_turn("a", ids[:48], 1)
    state = await keep(engine, first, 0, chunk=16)
    turn = make_turn("b", ids[: 48 if mode == "replay" else PROMPT], 40, temperature=1.0)
    length = len(turn.prompt.ids) - 1 if mode == "replay" else 48
    tokens, _ = await run_from(engine, first, turn, length, state, drafts=4)
    assert tokens == run_cold(make_engine(model, mode, head), turn, drafts=4)[0]
    assert len(set(tokens)) > 3


def run_model(model: Model, prompt: I64, decoded: I64, following: I64) -> F32:
    """A cache that replays `prompt`, decodes, replays `following`: the logits of its last position and 23 more."""
    cache = model.new_cache()
    model.prefill_replay(cache, prompt, last=True)
    for token in decoded:
        model.forward([(cache, np.array([token]))])
    output = model.prefill_replay(cache, following, last=True)
    assert output is not None
    rows = [model.logits(output, slice(-1, None))[0]]
    for _ in range(23):
        rows.append(model.logits(model.forward([(cache, np.array([rows[-1].argmax()]))]), slice(None))[0])
    return np.stack(rows)


@pytest.mark.parametrize(
    ("prompt", "rest"), [(33, 30), pytest.param(33, 9, marks=FULL), pytest.param(120, 17, marks=FULL)]
)
@pytest.mark.parametrize("less", [pytest.param(0, marks=FULL), 5])
async def test_after_a_replay_it_is_a_run_with_the_same_replays(
    model: Model, ids: I64, prompt: int, rest: int, less: int
) -> None:
    engine, first = make_engine(model, "replay"), make_turn("a", ids[:prompt], 10)
    attach(engine, first)
    reply = prefill(engine, first) + decode(engine, first)
    state = await engine.read_state("a")
    assert state is not None
    assert state.length == prompt + 9
    assert state.spare == 9, "positions before the replay are not spared: no run went through them with such windows"
    following = make_turn("b", np.concatenate([ids[:prompt], reply[: 9 - less], ids[100 : 100 + rest]]), 24)
    tokens, _ = await run_from(engine, first, following, prompt + 9 - less, state)
    same = run_model(model, ids[:prompt], np.array(reply[: 9 - less]), ids[100 : 100 + rest])
    assert tokens == same.argmax(axis=1).tolist()


async def test_there_is_no_state_in_the_midst_of_a_replay(model: Model, ids: I64) -> None:
    engine, turn = make_engine(model, "replay"), make_turn("a", ids[:100])
    attach(engine, turn)
    found = []
    for start in (0, 40, 80):
        prefill(engine, turn, start, min(start + 40, 100))
        found.append(await engine.read_state("a"))
    assert found[:2] == [None, None]
    assert found[2] is not None and (found[2].length, found[2].spare, found[2].repeats) == (100, 0, True)


async def test_what_does_not_fit_is_refused_and_leaves_the_turn_as_it_was(model: Model, ids: I64) -> None:
    engine, first = make_engine(model), make_turn("a", ids[:40])
    state = await keep(engine, first)
    turn = make_turn("b", np.concatenate([ids[:40], ids[60:70]]), 24)
    attach(engine, turn)
    for wrong, length, text in (
        (msgspec.structs.replace(state, fingerprint="other"), 40, "the state is of other"),
        (msgspec.structs.replace(state, payload=state.payload[1:]), 40, "does not fit this model"),
        (msgspec.structs.replace(state, ids=state.ids[8:]), 40, "bytes of ids"),
        (msgspec.structs.replace(state, ids=bytes(8) + state.ids[8:]), 40, "another prompt"),
        (state, 41, "another prompt"),
        (state, 23, "cannot be cut to 23"),
        (state, 50, "cannot go on behind 50"),
        (None, 40, "from a state only"),
    ):
        with pytest.raises(CheckpointError, match=text):
            await engine.resume("b", length, wrong)
    assert await engine.resume("b", 0, None) == 0
    assert prefill(engine, turn) + decode(engine, turn) == run_cold(make_engine(model), turn)[0]
    with pytest.raises(EngineFailed, match="positions of its own"):
        await engine.resume("b", 40, state)
    with pytest.raises(ContextTooLong, match="1 pages hold 128 tokens; 110 in the prompt and 24 to generate make 134"):
        engine.attach(make_turn("c", ids[:110], 24), [0])


async def test_calls_take_effect_in_the_order_in_which_they_are_made(
    model: Model, ids: I64, cold: tuple[list[int], bytes]
) -> None:
    """All are made before one is waited for."""
    engine, turn = make_engine(model), make_turn("a", ids[:PROMPT], WANTED)
    last = attach(engine, turn)[1]
    rows = memoryview(bytearray(engine.layout.page_bytes))
    middle = engine.step(StepPlan(prefill=(PrefillRange("a", 0, 130),)))
    at_middle, page = engine.read_state("a"), engine.read_pages([last], [rows])
    end = engine.step(StepPlan(prefill=(PrefillRange("a", 130, PROMPT),)))
    at_end, steps = engine.read_state("a"), [engine.step(StepPlan(decode=("a",))) for _ in range(WANTED + 1)]
    results = [await call for call in (middle, end, *steps)]
    assert [len(result) for result in results] == [1] * (WANTED + 1) + [0] * 2, "an ended turn yields nothing"
    assert ([token for [result] in results[:-2] for token in result.ids], global_bytes(engine, turn)) == cold
    states = await at_middle, await at_end
    assert [state.length for state in states if state] == [130, PROMPT]
    await page
    other = make_engine(model)
    assert attach(other, turn)[1] == last
    prefill(other, turn, 0, 130)
    assert bytes(rows) == other.pool.pages[last].tobytes() != engine.pool.pages[last].tobytes()


async def test_a_call_that_nobody_waits_for_takes_effect(model: Model, ids: I64) -> None:
    engine, turn = make_engine(model), make_turn("a", ids[:PROMPT])
    attach(engine, turn)
    waiting = [asyncio.ensure_future(engine.step(StepPlan(prefill=(PrefillRange("a", n, n + 40),)))) for n in (0, 40)]
    await asyncio.sleep(0)
    for call in waiting:
        call.cancel()
    state = await engine.read_state("a")
    assert state is not None and state.length == 80
    assert all(call.cancelled() for call in waiting)


async def test_a_resume_that_nobody_waits_for_is_of_the_turn_that_it_was_made_for(
    model: Model, ids: I64, cold: tuple[list[int], bytes]
) -> None:
    """Another stay under the same name begins before it takes effect."""
    engine, turn = make_engine(model), make_turn("b", ids[:PROMPT], WANTED)
    state = await keep(engine, make_turn("a", ids[:PROMPT]), 129)
    attach(engine, turn)
    late = engine.resume("b", 129, state)
    engine.detach("b")
    attach(engine, turn)
    assert await late == 129
    assert (prefill(engine, turn) + decode(engine, turn), global_bytes(engine, turn)) == cold

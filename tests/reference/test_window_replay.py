"""Going on from pages alone: the last window of positions is computed again, with windows cut at its start.

The oracle does the same by other means: a cold run whose windows are made to forget what is before that point, and
whose entries are set back to the cold ones as soon as they were written.
"""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from dsuf.reference import model as model_module
from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.batch import NoObserver
from dsuf.reference.cache import SequenceCache
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model, PrefillMode
from dsuf.reference.speculate import HeadDrafter
from dsuf.types import StepPlan, StepResult
from tests.reference.rig import attach, decode, global_bytes, make_turn, prefill, take_over
from tests.reference.test_resume import EDGES, make_engine

WINDOW = 16
PROMPT = 150
WANTED = 64
SHORT = (1, 128)
FULL = pytest.mark.full
LENGTHS = [n if n in SHORT else pytest.param(n, marks=FULL) for n in EDGES]


@pytest.fixture(scope="module")
def head(small_checkpoint: Path, model: Model) -> HeadDrafter:
    return HeadDrafter(load_draft(small_checkpoint, model))


@pytest.fixture(scope="module")
def source(model: Model, ids: I64) -> SequenceCache:
    """A cold run of the whole prompt; its entries are those that pages hold."""
    cache = model.new_cache()
    model.prefill_replay(cache, ids[:PROMPT], last=True)
    return cache


class ColdEntries(NoObserver):
    """Sets entries of the first `length` positions back to those of `source` as soon as a layer has written them."""

    def __init__(self, cache: SequenceCache, source: SequenceCache, length: int) -> None:
        self.cache, self.source, self.length = cache, source, length

    def see(self, name: str, value: NDArray[np.generic]) -> None:
        if name.endswith("compressed_latent_pre_rope"):
            self.restore(int(name.split(".")[1]))

    def restore(self, layer: int) -> None:
        rows = slice(self.length // self.cache._ratios[layer])
        for kind in ("entries", "index_keys"):
            store = getattr(self.cache, kind)[layer]
            store.packed.put(0, getattr(self.source, kind)[layer].packed.get(rows))
            store._known = 0


def run_oracle(model: Model, ids: I64, source: SequenceCache, length: int) -> tuple[F32, SequenceCache]:
    """Logits at the end of the prompt, and the cache there."""
    cache, start = model.new_cache(), max(0, length - WINDOW)
    if start:
        model.forward([(cache, ids[:start])])
    for ring in [*cache.windows, *cache.draft_windows]:
        ring.floor = start
    cold = ColdEntries(cache, source, length)
    with patch.object(model_module, "NO_OBSERVER", cold):
        model.prefill_replay(cache, ids[start:length], last=False)
        cold.restore(model.config.decoder_start)
        output = model.prefill_replay(cache, ids[length:PROMPT], last=True)
    assert output is not None
    return model.logits(output, slice(-1, None))[0], cache


def continue_greedily(model: Model, cache: SequenceCache, logits: F32) -> list[int]:
    reply = [int(logits.argmax())]
    while len(reply) < WANTED:
        output = model.forward([(cache, np.array(reply[-1:]))])
        reply.append(int(model.logits(output, slice(None))[0].argmax()))
    return reply


async def run_engine(
    engine: ReferenceEngine, ids: I64, length: int, chunk: int = 400, drafts: int = 0
) -> tuple[list[int], bytes]:
    """A turn that goes on from the pages of a first one."""
    first, turn = make_turn("a", ids[:PROMPT]), make_turn("b", ids[:PROMPT], WANTED)
    shared = attach(engine, first)[: length // engine.layout.page_tokens]
    prefill(engine, first)
    before = engine.pool.pages[shared].copy()
    start = await take_over(engine, first, turn, length, None)
    assert start == max(0, length - WINDOW)
    reply = prefill(engine, turn, start, chunk=chunk) + decode(engine, turn, drafts)
    assert np.array_equal(engine.pool.pages[shared], before), "the pages stay as they are"
    return reply, global_bytes(engine, turn)


@pytest.mark.full
@pytest.mark.parametrize("length", LENGTHS)
async def test_it_is_a_run_with_windows_cut_there(model: Model, ids: I64, source: SequenceCache, length: int) -> None:
    logits, cache = run_oracle(model, ids, source, length)
    reply, held = await run_engine(make_engine(model, "replay"), ids, length)
    assert reply == continue_greedily(model, cache, logits)
    assert held == cache.global_bytes()


@pytest.mark.full
@pytest.mark.parametrize(("chunk", "drafts"), [(7, 0), (16, 3), pytest.param(1, 5, marks=FULL)])
@pytest.mark.parametrize("length", [65, pytest.param(129, marks=FULL)])
async def test_chunks_and_drafts_change_nothing(
    model: Model, ids: I64, head: HeadDrafter, length: int, chunk: int, drafts: int
) -> None:
    expected = await run_engine(make_engine(model, "replay"), ids, length)
    assert await run_engine(make_engine(model, "replay", head), ids, length, chunk, drafts) == expected


async def test_within_the_window_it_is_the_cold_run(model: Model, ids: I64) -> None:
    """All is computed again, so only the entries are not written."""
    engine = make_engine(model, "replay")
    expected = make_turn("a", ids[:PROMPT], WANTED)
    attach(engine, expected)
    cold = prefill(engine, expected) + decode(engine, expected), global_bytes(engine, expected)
    for length in (1, WINDOW):
        assert await run_engine(make_engine(model, "replay"), ids, length) == cold


async def test_its_own_states_are_states(model: Model, ids: I64, source: SequenceCache) -> None:
    """The next turn goes on from the end of one that began with a replay, and is as spare as that one allows."""
    engine = make_engine(model, "replay")
    reply, _ = await run_engine(engine, ids, 140)
    state = await engine.read_state("b")
    assert state is not None
    assert state.length == PROMPT + WANTED - 1
    engine.detach("a")
    following = make_turn("c", np.concatenate([ids[:PROMPT], reply, ids[:9]]), 24)
    start = await take_over(engine, make_turn("b", ids[:2]), following, state.length, state)
    assert start == state.length
    cache = run_oracle(model, ids, source, 140)[1]
    for token in reply[:-1]:
        model.forward([(cache, np.array([token]))])
    output = model.prefill_replay(cache, np.array(following.prompt.ids[start:]), last=True)
    assert output is not None
    expected = int(model.logits(output, slice(-1, None))[0].argmax())
    assert prefill(engine, following, start) == [expected]


@pytest.mark.parametrize(("length", "most"), [(64, 0.4), (100, 0.7), (128, 0.8), (144, 1.35)])
def test_distance_to_a_cold_exact_run(model: Model, ids: I64, source: SequenceCache, length: int, most: float) -> None:
    """An approximation, which fades with the positions behind the cut; on random weights it is far at first.

    Logits that have nothing to do with each other are 1.41 apart.
    """
    exact = model.logits(model.forward([(model.new_cache(), ids[:PROMPT])]), slice(-1, None))[0]
    warm = run_oracle(model, ids, source, length)[0]
    distance = float(np.linalg.norm(warm - exact) / np.linalg.norm(exact))
    print(f"{PROMPT - length} positions behind pages: relative distance of the logits to exact {distance:.3f}")
    assert 0 < distance < most


@pytest.mark.parametrize("mode", [pytest.param("exact", marks=pytest.mark.full), "replay"])
async def test_two_turns_go_on_from_the_same_pages_at_once(
    model: Model, ids: I64, head: HeadDrafter, mode: PrefillMode
) -> None:
    """One with drafts, one after the other's steps; both as if alone."""
    engine = make_engine(model, mode, head)
    first = make_turn("a", ids[:129])
    attach(engine, first)
    prefill(engine, first)
    state = await engine.read_state("a") if mode == "exact" else None
    turns = [make_turn("b", ids[:PROMPT], 40), make_turn("c", np.concatenate([ids[:129], ids[:12]]), 40)]
    alone = []
    for turn in turns:
        start = await take_over(engine, first, turn, 129, state)
        alone.append((prefill(engine, turn, start) + decode(engine, turn), global_bytes(engine, turn)))
        engine.detach(turn.id)
    starts = [await take_over(engine, first, turn, 129, state) for turn in turns]
    replies = {t.id: prefill(engine, t, start, chunk=9) for t, start in zip(turns, starts, strict=True)}
    results: list[StepResult] | None = None
    while results is None or results:
        results = engine.run(StepPlan(decode=("b",))) + engine.run(StepPlan(decode=("c",), drafts=5))
        for result in results:
            replies[result.turn] += result.ids
    assert [(replies[turn.id], global_bytes(engine, turn)) for turn in turns] == alone

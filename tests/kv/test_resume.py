"""A turn that goes on from a commit point makes the tokens and the cache bytes of one that computed everything.

In `exact` mode and at the chunk ends of a replayed prefill that is a cold run; behind a replayed prefill it is a run
that replayed at the same lengths.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsuf.kv.attach import usable_tokens
from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model, PrefillMode
from dsuf.reference.speculate import HeadDrafter
from dsuf.types import PrefillRange, Prompt, Sampling, SessionCache, StepPlan, Turn

WANTED = 24
PROMPT = 75
SHORT = [1, 2, 16, 17, 33, 65]
FULL = pytest.mark.full
LENGTHS = [n if n in SHORT else pytest.param(n, marks=FULL) for n in range(1, PROMPT)]


@pytest.fixture(scope="module")
def head(small_checkpoint: Path, model: Model) -> HeadDrafter:
    return HeadDrafter(load_draft(small_checkpoint, model))


def make_engine(model: Model, prefill: PrefillMode = "exact", head: HeadDrafter | None = None) -> ReferenceEngine:
    return ReferenceEngine(model, "reference", "test", context_tokens=400, max_turns=8, prefill=prefill, drafter=head)


class Session:
    """A turn in an engine, by hand."""

    def __init__(
        self, engine: ReferenceEngine, ids: I64, max_tokens: int = WANTED, temperature: float = 0.0
    ) -> None:  # fmt: skip
        sampling = Sampling(temperature=temperature, top_p=0.95, seed=1, max_tokens=max_tokens)
        self.engine, self.ids, self.reply, self.finish = engine, ids, list[int](), ""
        engine.detach("a")
        engine.attach(Turn(id="a", prompt=Prompt(ids=tuple(ids.tolist())), sampling=sampling))

    def prefill(self, start: int, stop: int, chunk: int = 400) -> None:
        for first in range(start, stop, chunk):
            plan = StepPlan(prefill=(PrefillRange("a", first, min(first + chunk, stop)),))
            self.reply += self.engine.run(plan)[0].ids

    def decode(self, drafts: int = 0) -> list[int]:
        while not self.finish:
            [result] = self.engine.run(StepPlan(decode=("a",), drafts=drafts))
            self.reply += result.ids
            self.finish = result.finish or ""
        return self.reply

    async def resume(self, kept: SessionCache, length: int) -> None:
        await self.engine.import_session("a", kept, length)
        self.prefill(length, len(self.ids))

    @property
    def bytes(self) -> bytes:
        return self.engine._turns["a"].cache.global_bytes()


def run_cold(engine: ReferenceEngine, ids: I64, drafts: int = 0) -> tuple[list[int], bytes]:
    session = Session(engine, ids)
    session.prefill(0, len(ids))
    return session.decode(drafts), session.bytes


async def run_from(engine: ReferenceEngine, ids: I64, kept: SessionCache, drafts: int = 0) -> tuple[list[int], bytes]:
    session = Session(engine, ids)
    await session.resume(kept, usable_tokens(kept, common(kept, ids), len(ids)))
    return session.decode(drafts), session.bytes


def common(kept: SessionCache, ids: I64) -> int:
    stored = np.frombuffer(kept.ids, np.int64)
    same = stored[: len(ids)] == ids[: len(stored)]
    return len(same) if same.all() else int(np.argmin(same))


async def keep(engine: ReferenceEngine, ids: I64, stop: int, chunk: int = 400) -> SessionCache:
    session = Session(engine, ids)
    session.prefill(0, stop, chunk)
    return await engine.export_session("a")


@pytest.fixture(scope="module")
def cold(model: Model, ids: I64) -> tuple[list[int], bytes]:
    return run_cold(make_engine(model), ids[:PROMPT])


@pytest.fixture(scope="module")
def cold_replay(model: Model, ids: I64) -> tuple[list[int], bytes]:
    return run_cold(make_engine(model, "replay"), ids[:PROMPT])


@pytest.mark.parametrize("length", LENGTHS)
async def test_restored_at_any_length(model: Model, ids: I64, cold: tuple[list[int], bytes], length: int) -> None:
    engine = make_engine(model)
    kept = await keep(engine, ids[:PROMPT], length)
    assert kept.length == length
    assert await run_from(engine, ids[:PROMPT], kept) == cold


@pytest.mark.parametrize("length", LENGTHS)
async def test_restored_in_the_middle_of_a_replay_is_as_cold(
    model: Model, ids: I64, cold_replay: tuple[list[int], bytes], length: int
) -> None:
    engine = make_engine(model, "replay")
    kept = await keep(engine, ids[:PROMPT], length, chunk=13)
    assert (kept.length, kept.spare, kept.repeats) == (length, 0, False)
    assert await run_from(engine, ids[:PROMPT], kept) == cold_replay


@pytest.mark.parametrize(
    ("length", "less"),
    [
        (length, less) if (length + less) % 12 == 4 else pytest.param(length, less, marks=FULL)
        for length in (33, 48, 64, 65)
        for less in range(1, 17)
    ],
)
async def test_the_last_positions_can_be_left_off(model: Model, ids: I64, length: int, less: int) -> None:
    """Pitfall 11: what the prompts share is used, even if it ends before the commit point."""
    engine = make_engine(model)
    kept = await keep(engine, ids[:length], length)
    other = np.concatenate([ids[: length - less], ids[100:109]])
    assert usable_tokens(kept, common(kept, other), len(other)) == length - less
    assert await run_from(engine, other, kept) == run_cold(engine, other)


@pytest.mark.parametrize("prefill", ["exact", "replay"])
@pytest.mark.parametrize("length", [16, 49])
async def test_the_same_prompt_again_computes_its_last_token(
    model: Model, ids: I64, prefill: PrefillMode, length: int
) -> None:
    engine = make_engine(model, prefill)
    kept = await keep(engine, ids[:length], length)
    assert usable_tokens(kept, length, length) == length - 1
    assert await run_from(engine, ids[:length], kept) == run_cold(engine, ids[:length])


@pytest.mark.parametrize(
    ("drafts", "max_tokens"), [(0, 1), (5, 19), pytest.param(0, 2, marks=FULL), pytest.param(3, 20, marks=FULL)]
)
async def test_the_end_of_a_turn_by_length(
    model: Model, ids: I64, head: HeadDrafter, drafts: int, max_tokens: int
) -> None:
    engine = make_engine(model, head=head)
    first = Session(engine, ids[:40], max_tokens)
    first.prefill(0, 40)
    reply = first.reply if max_tokens == 1 else first.decode(drafts)
    kept = await engine.export_session("a")
    assert kept.length in (40 + max_tokens - 1, 40 + max_tokens), "all but perhaps the last token, which is not fed yet"
    following = np.concatenate([ids[:40], reply, ids[120:131]])
    assert common(kept, following) == kept.length
    assert await run_from(engine, following, kept, drafts) == run_cold(engine, following, drafts)


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=FULL), 5])
async def test_the_end_of_a_turn_by_the_end_of_sentence(model: Model, ids: I64, head: HeadDrafter, drafts: int) -> None:
    engine = make_engine(model, head=head)
    expected, _ = run_cold(engine, ids[:41])
    eos = expected[17]
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=eos)
    first = Session(engine, ids[:41])
    first.prefill(0, 41)
    reply = first.decode(drafts)
    kept = await engine.export_session("a")
    assert first.finish == "stop"
    assert kept.length == 41 + len(reply), "every token that was handed out, the end-of-sentence token is not fed"
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=-1)
    following = np.concatenate([ids[:41], reply, [eos], ids[120:131]])
    assert await run_from(engine, following, kept, drafts) == run_cold(engine, following, drafts)


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=FULL), 5])
@pytest.mark.parametrize("cut", [7])
async def test_a_reply_cut_by_a_stop_string(model: Model, ids: I64, head: HeadDrafter, drafts: int, cut: int) -> None:
    """The engine went on behind the cut; what the client sends back does not."""
    engine = make_engine(model, head=head)
    first = Session(engine, ids[:40])
    first.prefill(0, 40)
    while len(first.reply) < 15:
        first.reply += engine.run(StepPlan(decode=("a",), drafts=drafts))[0].ids
    kept = await engine.export_session("a")
    following = np.concatenate([ids[:40], first.reply[:-cut], ids[120:131]])
    assert usable_tokens(kept, common(kept, following), len(following)) >= 40 + len(first.reply) - cut
    assert await run_from(engine, following, kept, drafts) == run_cold(engine, following, drafts)


@pytest.mark.parametrize("prefill", ["exact", pytest.param("replay", marks=FULL)])
async def test_a_seeded_reply_with_drafts_is_as_cold(
    model: Model, ids: I64, head: HeadDrafter, prefill: PrefillMode
) -> None:
    """Its tokens hang on the drafts too, hence on the draft head's rows."""
    engine = make_engine(model, prefill, head)
    kept = await keep(engine, ids[:PROMPT], 48, chunk=16)
    cold = Session(engine, ids[:PROMPT], temperature=1.0)
    cold.prefill(0, PROMPT)
    expected = cold.decode(4)
    warm = Session(engine, ids[:PROMPT], temperature=1.0)
    await warm.resume(kept, 48)
    assert warm.decode(4) == expected
    assert len(set(expected)) > 3


async def test_what_drafts_wrote_beyond_the_end_is_not_spared(model: Model, ids: I64, head: HeadDrafter) -> None:
    """Rejected rows took the places of the oldest ones, so fewer positions can be left off."""
    engine = make_engine(model, head=head)
    session = Session(engine, ids[:40])
    session.prefill(0, 40)
    engine.run(StepPlan(decode=("a",), drafts=5))
    kept = await engine.export_session("a")
    written = 46 - kept.length
    assert written > 0
    assert kept.spare == 16 - written
    other = np.concatenate([np.frombuffer(kept.ids, np.int64)[: kept.length - kept.spare], ids[100:109]])
    assert usable_tokens(kept, common(kept, other), len(other)) == kept.length - kept.spare
    assert await run_from(engine, other, kept) == run_cold(engine, other)


def run_model(model: Model, prompt: I64, decoded: I64, following: I64) -> F32:
    """A cache that replays `prompt`, decodes, replays `following`: the logits of its last position and 24 more."""
    cache = model.new_cache()
    model.prefill_replay(cache, prompt, last=True)
    for token in decoded:
        model.forward([(cache, np.array([token]))])
    output = model.prefill_replay(cache, following, last=True)
    assert output is not None
    rows = [model.logits(output, slice(-1, None))[0]]
    for _ in range(WANTED - 1):
        rows.append(model.logits(model.forward([(cache, np.array([rows[-1].argmax()]))]), slice(None))[0])
    return np.stack(rows)


@pytest.mark.parametrize(
    ("prompt", "rest"), [(33, 30), pytest.param(33, 9, marks=FULL), pytest.param(65, 17, marks=FULL)]
)
@pytest.mark.parametrize("less", [0, 5])
async def test_after_a_replay_it_is_a_run_with_the_same_replays(
    model: Model, ids: I64, prompt: int, rest: int, less: int
) -> None:
    engine = make_engine(model, "replay")
    first = Session(engine, ids[:prompt], 10)
    first.prefill(0, prompt)
    reply = first.decode()
    kept = await engine.export_session("a")
    assert kept.length == prompt + 9
    assert kept.spare == 9, "positions before the replay are not spared: no run went through them with such windows"
    following = np.concatenate([ids[:prompt], reply[: 9 - less], ids[100 : 100 + rest]])
    tokens, _ = await run_from(engine, following, kept)
    same = run_model(model, ids[:prompt], np.array(reply[: 9 - less]), ids[100 : 100 + rest])
    assert tokens == same.argmax(axis=1).tolist()


async def test_a_shared_part_before_a_replay_is_no_hit(model: Model, ids: I64) -> None:
    engine = make_engine(model, "replay")
    kept = await keep(engine, ids[:64], 64)
    assert (kept.spare, kept.repeats) == (0, True)
    assert usable_tokens(kept, 63, 70) == 0
    assert usable_tokens(kept, 64, 70) == 64

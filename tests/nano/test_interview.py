"""Questions to a reference engine: answers behind shared beginnings are those of prompts computed alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.nano.interview import ONE_TOKEN, Ids, Interview, Question, Reply, Start, follows, measure_shared
from dsuf.checkpoint.synthetic import write_synthetic
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft, load_model
from dsuf.reference.model import Model, PrefillMode
from dsuf.reference.pages import PAGE_TOKENS
from dsuf.reference.speculate import HeadDrafter
from dsuf.types import PrefillRange, Prompt, Sampling, StepPlan, Turn
from tests.reference.conftest import TINY, small_config

GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=12)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, HeadDrafter]:
    directory: Path = tmp_path_factory.mktemp("small")
    write_synthetic(directory, small_config(), 7, (TINY / "tokenizer.json").read_bytes())
    model = load_model(directory)
    return model, HeadDrafter(load_draft(directory, model))


@pytest.fixture(scope="module", params=["exact", "replay"])
def engine(request: pytest.FixtureRequest, parts: tuple[Model, HeadDrafter]) -> ReferenceEngine:
    return make_engine(parts, request.param)


def make_engine(parts: tuple[Model, HeadDrafter], prefill: PrefillMode) -> ReferenceEngine:
    model, head = parts
    return ReferenceEngine(
        model, "reference", "test", context_tokens=500, max_turns=2, prefill=prefill, pages=12, drafter=head
    )


def draw_ids(count: int, seed: int) -> Ids:
    return tuple(np.random.default_rng(seed).integers(3, 200, count).tolist())


async def ask(engine: ReferenceEngine, questions: Sequence[Question], start: Start, drafts: int = 5) -> list[Reply]:
    return [reply async for reply in Interview(engine, drafts).ask_all(questions, [start])]


def ask_alone(engine: ReferenceEngine, question: Question) -> Ids:
    """By hand, without drafts, the prompt in one piece."""
    length = len(question.prompt)
    turn = Turn(id="alone", prompt=Prompt(ids=question.prompt), sampling=question.sampling)
    engine.attach(turn, range(engine.layout.pages_for(length + 12 + engine.layout.overrun_tokens)))
    [result] = engine.run(StepPlan(prefill=(PrefillRange("alone", 0, length),)))
    ids = result.ids
    while result.finish is None:
        [result] = engine.run(StepPlan(decode=("alone",)))
        ids += result.ids
    engine.detach("alone")
    return ids


@pytest.mark.full
async def test_prompts_that_begin_alike(engine: ReferenceEngine) -> None:
    """Forked in the midst of the prefill, in both modes: as if each had been computed alone."""
    text = draw_ids(300, 1)
    questions = [Question(text + draw_ids(20 + n, 2 + n), (), GREEDY) for n in range(3)]
    replies = await ask(engine, questions, "cold")
    assert [reply.ids for reply in replies] == [ask_alone(engine, question) for question in questions]
    assert {len(reply.ids) for reply in replies} == {12}
    assert engine.counters()["turns"] == 0


async def test_host_copies(parts: tuple[Model, HeadDrafter]) -> None:
    """In exact mode a reply behind a host copy is that of a prompt computed alone; behind pages it takes a replay."""
    engine = make_engine(parts, "exact")
    text = draw_ids(300, 1)
    questions = [Question(text + draw_ids(20, 2 + n), (), GREEDY) for n in range(2)]
    assert [r.ids for r in await ask(engine, questions, "state")] == [ask_alone(engine, q) for q in questions]
    replaying = make_engine(parts, "replay")
    assert {len(reply.ids) for reply in await ask(replaying, questions, "pages")} == {12}


@pytest.mark.full
@pytest.mark.parametrize("text_tokens", [300, 200, 256])
async def test_starts_that_share_a_text(engine: ReferenceEngine, text_tokens: int) -> None:
    """One reading serves all: the copy of a turn that is forked and ended is, to the byte, that of one read alone."""
    text = draw_ids(text_tokens, 1)
    questions = [Question(text + draw_ids(20, 2 + n), (), GREEDY) for n in range(2)]
    starts: list[Start] = ["cold", "state", "pages"] if engine.layout.replay_tokens else ["cold", "state"]
    together = [reply.ids async for reply in Interview(engine, 5).ask_all(questions, starts)]
    assert together == [reply.ids for start in starts for reply in await ask(engine, questions, start)]
    reader = Interview(engine, 5)
    base, copy = await reader._read(questions, ["cold", "state"])
    alone = reader._open(text, ONE_TOKEN)
    await reader._prefill(alone, 0, len(text))
    own = await reader._keep(alone)
    assert copy is not None and (copy.length, copy.state) == (own.length, own.state)
    whole = len(text) // PAGE_TOKENS  # behind the text a page has what was there before
    assert copy.pages[:whole] == own.pages[:whole]
    for name in (base, alone):
        reader._close(name or "")
    assert engine.counters()["turns"] == 0


async def test_conversation_goes_on_from_its_own_turns(parts: tuple[Model, HeadDrafter]) -> None:
    """Behind a right reply, and behind the prompt where the reply was wrong: both give what a cold run gives."""
    engine = make_engine(parts, "exact")
    first = Question(draw_ids(140, 1), ask_alone(engine, Question(draw_ids(140, 1), (), GREEDY)), GREEDY)
    second = Question(first.prompt + first.answer + draw_ids(30, 2), draw_ids(9, 3), GREEDY)
    third = Question(second.prompt + second.answer + draw_ids(30, 4), (), GREEDY)
    assert follows(first, second)
    assert follows(second, third)
    assert not follows(third, second)
    replies = await ask(engine, [first, second, third], "state")
    assert [reply.ids for reply in replies] == [ask_alone(engine, question) for question in (first, second, third)]
    assert replies[0].ids == first.answer
    assert replies[1].ids != second.answer


def test_shared_beginning() -> None:
    """Of every prompt at least one position is left to compute."""
    assert measure_shared([(1, 2, 3)]) == 0
    assert measure_shared([(1, 2, 3), (1, 2, 4), (1, 2, 3, 5)]) == 2
    assert measure_shared([(1, 2, 3), (1, 2, 3, 4)]) == 2

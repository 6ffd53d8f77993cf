"""Constraints and log-probabilities on a GPU: kept, the same in every way of dividing the work, and the reference's."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.campaigns.constraints import BATCH, StepByStep, run_schemas
from dsuf.checkpoint.forms import NANO
from dsuf.cuda.arena import read_array
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Machine, Setup
from dsuf.node.engines import Model, open_model
from dsuf.recipe.grammar import write_regex
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_model
from dsuf.types import Constraint, Mask, PrefillRange, Prompt, Sampling, StepPlan, StepResult, Turn
from tests.cuda.drive import RULE, ThirdMask, count_pages, generate, make_turn, share
from tests.kernels.gpu import missing

TOKENS = 40


@pytest.fixture(scope="module")
def engine(machine: Machine) -> Iterator[CudaEngine]:
    """An engine whose constraints are a third of the tokens at each place."""

    def open_mask(constraint: Constraint) -> Mask:
        return ThirdMask(machine.config.vocab_size, end=machine.config.eos_token_id)

    with share(machine, "exact", open_mask=open_mask) as engine:
        yield engine


@pytest.fixture
def prompts(machine: Machine) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, machine.config.vocab_size, size) for size in (1, 2, 15, 17, 64, 90)]


def run_turns(engine: CudaEngine, turns: list[Turn], drafts: int = 0, ahead: int = 0) -> list[list[StepResult]]:
    """All results of turns that decode together."""
    used = 0
    for turn in turns:
        engine.attach(turn, range(used, used + count_pages(turn)))
        used += count_pages(turn)
    (results,) = engine.run(StepPlan(prefill=tuple(PrefillRange(t.id, 0, len(t.prompt.ids)) for t in turns)))
    found = {result.turn: [result] for result in results}
    while going := tuple(name for name, told in found.items() if told[-1].finish is None):
        for results in engine.run(*[StepPlan(decode=going, drafts=drafts)] * (1 + ahead)):
            for result in results:
                found[result.turn].append(result)
    for turn in turns:
        engine.detach(turn.id)
    return [found[turn.id] for turn in turns]


def ids_of(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_is_kept(
    engine: CudaEngine, machine: Machine, prompts: list[NDArray[np.int64]], temperature: float
) -> None:
    """By every token, with drafts and steps ahead; turns beside them that have none say what they say alone."""
    free = [generate(engine, [ids], TOKENS, temperature=temperature, seed=5)[0] for ids in prompts]
    for drafts in (0, 1, 5):
        for ahead in (0, 3):
            turns = [
                make_turn(ids, TOKENS, RULE if i % 2 else None, temperature=temperature, seed=5)
                for i, ids in enumerate(prompts)
            ]
            found = run_turns(engine, turns, drafts, ahead)
            for i, results in enumerate(found):
                ids, mask = ids_of(results), ThirdMask(machine.config.vocab_size)
                if i % 2:
                    assert all(mask._find(ids[:at])[token] for at, token in enumerate(ids)), (drafts, ahead)
                    assert results[-1].finish == "stop" or len(ids) == TOKENS
                elif temperature == 0 or not drafts:
                    assert ids == free[i]
            if drafts and not temperature:
                assert sum(result.drafted for results in found for result in results) > 0


def test_drafts_change_no_greedy_answer(engine: CudaEngine, prompts: list[NDArray[np.int64]]) -> None:
    """Masked or not, alone or beside others, with any number of drafts, launched ahead or not, captured or not."""

    def turns() -> list[Turn]:
        return [make_turn(ids, TOKENS, RULE if i % 3 else None) for i, ids in enumerate(prompts)]

    alone = [ids_of(run_turns(engine, [turn])[0]) for turn in turns()]
    plain = CudaEngine(engine.machine, "weights", "exact", captures=False, open_mask=engine.open_mask)
    for other, drafts, ahead in ((engine, 0, 4), (engine, 2, 0), (engine, 5, 0), (engine, 5, 4), (plain, 5, 0)):
        found = run_turns(other, turns(), drafts, ahead)
        assert [ids_of(results) for results in found] == alone, (drafts, ahead)


def test_log_probabilities(engine: CudaEngine, machine: Machine, prompts: list[NDArray[np.int64]]) -> None:
    """They are those of the model's own logits, masked or not, drafted or not; drafts change none of them."""
    asked = list(zip(prompts, (20, 0, 5, None, 1, 3), strict=True))

    def turns() -> list[Turn]:
        return [make_turn(ids, 12, RULE if i % 2 else None, logprobs=top) for i, (ids, top) in enumerate(asked)]

    plain = run_turns(engine, turns())
    rated = [[one for result in results for one in result.logprobs] for results in plain]
    for drafts, ahead in ((5, 0), (3, 2)):
        drafted = run_turns(engine, turns(), drafts, ahead)
        assert [[one for result in results for one in result.logprobs] for results in drafted] == rated
    for (prompt, top), results, told in zip(asked, plain, rated, strict=True):
        ids = ids_of(results)
        assert len(told) == (0 if top is None else len(ids))
        for at, (logprob, likeliest) in enumerate(told):
            generate(engine, [np.append(prompt, ids[:at])], 1)
            logits = read_array(machine.prefiller.work["logits"])[0].astype(np.float64)
            expected = logits - np.logaddexp.reduce(logits)
            assert logprob == pytest.approx(expected[ids[at]], abs=2e-6)
            order = np.argsort(-logits, kind="stable")[:top]
            assert [token for token, _ in likeliest] == order.tolist()
            np.testing.assert_allclose([value for _, value in likeliest], expected[order], atol=2e-6)


def test_near_the_reference(engine: CudaEngine, machine: Machine, checkpoint: Path) -> None:
    """Log-probabilities and masked choices of both engines, the same prompts and replies; the roundings differ."""

    def open_mask(constraint: Constraint) -> Mask:
        return ThirdMask(machine.config.vocab_size, end=machine.config.eos_token_id)

    other = ReferenceEngine(
        load_model(checkpoint), "reference", "weights", context_tokens=512, max_turns=8, prefill="exact",
        open_mask=open_mask,
    )  # fmt: skip
    rng, same, off = np.random.default_rng(5), 0, []
    prompts = [rng.integers(3, machine.config.vocab_size, 12) for _ in range(24)]
    for prompt in prompts:
        turn = make_turn(prompt, 1, RULE, logprobs=5)
        [own] = run_turns(engine, [turn])
        other.attach(turn, range(other.layout.pages_for(len(prompt) + 1 + other.layout.overrun_tokens)))
        [theirs] = other.run(StepPlan(prefill=(PrefillRange(turn.id, 0, len(prompt)),)))
        other.detach(turn.id)
        same += own[0].ids == theirs.ids
        if own[0].ids == theirs.ids and own[0].ids:
            off.append(abs(own[0].logprobs[0][0] - theirs.logprobs[0][0]))
    print(
        f"\n{same} of {len(prompts)} masked choices alike, log-probabilities off by {np.median(off):.4f} at the median"
    )
    assert same >= len(prompts) / 2 and np.median(off) < 0.5


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[CudaEngine, Model]]:
    """The small model, its own grammars."""
    if reason := missing():
        pytest.skip(f"the CUDA engine was not run: {reason}")
    model = open_model(NANO)
    setup = Setup(context_tokens=4096, max_turns=16, pages=600, budget_bytes=8 << 30)
    engine = CudaEngine.load(NANO, setup, "replay", open_mask=model.masks.open)
    yield engine, model
    asyncio.run(engine.close())


def test_generated_schemas(small: tuple[CudaEngine, Model]) -> None:
    """Replies of the small model in batches, thinking, calls and drafts among them: whole ones follow their schemas."""
    engine, model = small
    tally = run_schemas(StepByStep(engine), model, range(48), BATCH, "cuda")
    print(f"\n{tally.done}")
    assert tally.faults == [] and tally.done["answered"] + tally.done["called"] > 24


def test_drafted_output_has_the_masked_distribution(small: tuple[CudaEngine, Model]) -> None:
    """Over many seeds the texts of drafted and plain turns are equally frequent."""
    engine, model = small
    counts = []
    for drafts in (0, 3):
        seen: dict[str, int] = {}
        for first in range(0, 640, 16):
            turns = [
                Turn(
                    id=f"t{drafts}-{seed}", prompt=Prompt(ids=(7, 8, 9)),
                    constraint=Constraint(grammar=write_regex("[ab][cd][ef]")),
                    sampling=Sampling(temperature=2.0, top_p=1.0, seed=seed + 10_000 * drafts, max_tokens=5),
                )
                for seed in range(first, first + 16)
            ]  # fmt: skip
            for results in run_turns(engine, turns, drafts):
                text = model.vocabulary.decode(ids_of(results))
                seen[text] = seen.get(text, 0) + 1
        counts.append(seen)
    plain, drafted = counts
    distance = sum(abs(plain.get(key, 0) - drafted.get(key, 0)) for key in {*plain, *drafted}) / 1280
    print(f"\n{plain}\n{drafted}")
    assert {*plain, *drafted} <= {a + b + c for a in "ab" for b in "cd" for c in "ef"} and distance < 0.12

"""What the engine samples, with drafts and without, against the distribution that its own logits say."""

import asyncio
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from dsuf.cuda.arena import read_array
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Machine
from dsuf.reference.sampler import distribution
from dsuf.types import PrefillRange, Sampling, StepPlan, Turn
from tests.cuda.drive import generate, make_turn

TURNS, WORDS = 4000, 3
Counts = NDArray[np.float64]


class Drawn(NamedTuple):
    """Replies [turns, words] to one prompt, a seed each, and how many drafts were kept on the way."""

    ids: NDArray[np.int64]
    accepted: int


async def draw_batch(engine: CudaEngine, turns: list[Turn], drafts: int) -> Drawn:
    """The replies of turns that begin and decode together."""
    for place, turn in enumerate(turns):
        engine.attach(turn, [place])
    said, accepted = {turn.id: list[int]() for turn in turns}, 0
    going, prefill = list(said), tuple(PrefillRange(turn.id, 0, len(turn.prompt.ids)) for turn in turns)
    while going:
        plan = StepPlan(prefill=prefill) if prefill else StepPlan(decode=tuple(going), drafts=drafts)
        prefill = ()
        for result in await engine.step(plan):
            said[result.turn] += result.ids
            accepted += result.accepted
            if result.finish:
                going.remove(result.turn)
    for turn in turns:
        engine.detach(turn.id)
    return Drawn(np.array([[*ids, -1, -1, -1][:WORDS] for ids in said.values()]), accepted)


def draw(engine: CudaEngine, prompt: NDArray[np.int64], sampling: Sampling, drafts: int) -> Drawn:
    """Many replies."""

    async def draw_all() -> list[Drawn]:
        batch, found = engine.facts.max_turns, []
        for first in range(0, TURNS, batch):
            seeds = range(first + 100_000 * drafts, first + batch + 100_000 * drafts)
            shared = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            turns = [make_turn(prompt, WORDS, seed=seed, **shared) for seed in seeds]
            found.append(await draw_batch(engine, turns, drafts))
        return found

    batches = asyncio.run(draw_all())
    return Drawn(np.concatenate([one.ids for one in batches]), sum(one.accepted for one in batches))


def read_logits(engine: CudaEngine, machine: Machine, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The logits behind `ids`."""
    generate(engine, [ids], 1)
    found: NDArray[np.float32] = read_array(machine.prefiller.work["logits"])[0]
    return found


def tell(logits: NDArray[np.float32], sampling: Sampling, eos_id: int) -> Counts:
    """Chances of every token, nothing behind the end."""
    chances = distribution(logits, sampling)
    return np.where(np.arange(len(chances)) == eos_id, 0, chances)


def fold(first: NDArray[np.int64], second: NDArray[np.int64], size: int) -> Counts:
    """How often pairs of tokens fall into each of 8 by 64 classes; what follows an end is left out."""
    known = (first >= 0) & (second >= 0)
    cells = first[known] % 8 * 64 + second[known] % 64
    return np.bincount(cells, minlength=size).astype(np.float64)


def surprise(found: Counts, expected: Counts, noise: float = 1.0) -> float:
    """How many standard deviations chi-square is above its mean (Wilson and Hilferty); rare cells count as one.

    `noise` is the variance of a cell's difference, in parts of `expected`.
    """
    order = np.argsort(-expected)
    found, expected = found[order], expected[order]
    rare = int((expected >= 5).sum())
    cells = [np.append(counts[:rare], counts[rare:].sum()) for counts in (found, expected)]
    kept = cells[1] >= 5
    own, target = (counts[kept] for counts in cells)
    square = float(((own - target) ** 2 / target / noise).sum())
    freedom = max(1, int(kept.sum()) - 1)
    return ((square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


HOT = Sampling(temperature=4.0, top_p=1.0, seed=0, max_tokens=WORDS)
NUCLEUS = Sampling(temperature=1.5, top_p=0.8, seed=0, max_tokens=WORDS)


@pytest.mark.full
@pytest.mark.parametrize("sampling", [HOT, NUCLEUS], ids=["hot", "nucleus"])
def test_replies_are_distributed_as_the_logits_say(machine: Machine, sampling: Sampling) -> None:
    """First tokens, pairs and later pairs of thousands of seeds, drafts off and on, by chi-square."""
    engine, eos = CudaEngine(machine, "weights", "exact"), machine.config.eos_token_id
    prompt = np.random.default_rng(6).integers(3, machine.config.vocab_size, 20)
    logits = read_logits(engine, machine, prompt)
    chances = tell(logits, sampling, eos)
    after = {token: read_logits(engine, machine, np.append(prompt, token)) for token in np.flatnonzero(chances)}

    def expect(how: Sampling) -> Counts:
        pairs = np.zeros((8, 64))
        for token, logits in after.items():
            folded = np.pad(tell(logits, how, eos), (0, -len(logits) % 64)).reshape(-1, 64).sum(axis=0)
            pairs[token % 8] += chances[token] * folded
        return pairs.ravel() * TURNS

    plain, drafted = draw(engine, prompt, sampling, 0), draw(engine, prompt, sampling, engine.facts.max_drafts)
    first = np.bincount(drafted.ids[drafted.ids[:, 0] >= 0, 0], minlength=len(chances)).astype(np.float64)
    pairs = {name: fold(one.ids[:, 0], one.ids[:, 1], 512) for name, one in (("plain", plain), ("drafted", drafted))}
    later = [fold(one.ids[:, 1], one.ids[:, 2], 512) for one in (plain, drafted)]
    colder = msgspec.structs.replace(sampling, temperature=0.7 * sampling.temperature)
    found = {
        "first": surprise(first, chances * TURNS),
        **{name: surprise(counts, expect(sampling)) for name, counts in pairs.items()},
        "later": surprise(later[1], (later[0] + later[1]) / 2, 0.5),
        "wrong": surprise(first, tell(logits, colder, eos) * TURNS),
    }
    print(f"\n{sampling}: {drafted.accepted} drafts kept, standard deviations {found}")
    assert max(found[name] for name in ("first", "plain", "drafted", "later")) < 4.5 < found["wrong"]
    assert drafted.accepted > TURNS / 100 and not first[chances == 0].any()


def test_chi_square_sees_what_is_off() -> None:
    """The measure is near zero for the right target and large for another."""
    rng = np.random.default_rng(2)
    chances = rng.dirichlet(np.ones(400))
    found = rng.multinomial(TURNS, chances).astype(np.float64)
    other = rng.multinomial(TURNS, chances).astype(np.float64)
    assert abs(surprise(found, chances * TURNS)) < 4
    assert abs(surprise(found, (found + other) / 2, 0.5)) < 4
    assert surprise(found, np.roll(chances, 1) * TURNS) > 20
    wrong = chances * rng.uniform(0.5, 1.5, 400)
    assert surprise(found, wrong / wrong.sum() * TURNS) > 4.5

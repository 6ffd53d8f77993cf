"""Drafts can only be rejected: greedy tokens and cache bytes are those of plain decoding, whatever is drafted."""

from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from dsuf.errors import ContextTooLong
from dsuf.reference.accept import AcceptanceRule
from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.cache import SequenceCache
from dsuf.reference.draft import Block
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model, PrefillMode
from dsuf.reference.sampler import choose, distribution
from dsuf.reference.speculate import Anchor, Drafter, HeadDrafter, Speculation, resolve
from dsuf.types import PrefillRange, Prompt, Sampling, StepPlan, StepResult, Turn
from tests.reference.rig import attach

WANTED = 40
SIZE = 5


class Planned:
    """Drafts that are right up to a number of tokens that changes from round to round, then wrong."""

    def __init__(self, reply: list[int], prompt: int, right: list[int], vocabulary: int) -> None:
        self.reply, self.prompt, self.right, self.vocabulary = reply, prompt, right, vocabulary
        self.rounds = 0

    def propose(self, anchors: list[Anchor], limit: int) -> Block:
        ids = np.zeros((len(anchors), SIZE), np.int64)
        for row, anchor in enumerate(anchors):
            following = self.reply[anchor.cache.length + 1 - self.prompt :] + [0] * SIZE
            right = self.right[self.rounds % len(self.right)]
            ids[row] = [t if slot < right else (t + 1) % self.vocabulary for slot, t in enumerate(following[:SIZE])]
        self.rounds += 1
        logits = np.where(np.arange(self.vocabulary) == ids[:, :, None], 0, -50).astype(np.float32)
        return Block(ids, logits, np.zeros((len(anchors), SIZE), np.float32), ())

    def feed(self, cache: SequenceCache, start: int, taps: F32) -> None:
        pass


class Noise:
    """Drafts drawn from random logits."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.rng, self.vocabulary = np.random.default_rng(seed), vocabulary

    def propose(self, anchors: list[Anchor], limit: int) -> Block:
        logits = self.rng.standard_normal((len(anchors), SIZE, self.vocabulary)).astype(np.float32)
        ids = [
            [choose(row, a.sampling, a.cache.length + 1 + slot, "draft") for slot, row in enumerate(rows)]
            for a, rows in zip(anchors, logits, strict=True)
        ]
        return Block(np.array(ids), logits, self.rng.standard_normal((len(anchors), SIZE)).astype(np.float32), ())

    def feed(self, cache: SequenceCache, start: int, taps: F32) -> None:
        pass


@pytest.fixture(scope="module")
def head(small_checkpoint: Path, model: Model) -> HeadDrafter:
    return HeadDrafter(load_draft(small_checkpoint, model))


def make_engine(model: Model, drafter: Drafter | None, prefill: PrefillMode = "exact") -> ReferenceEngine:
    return ReferenceEngine(
        model, "reference", "test", context_tokens=400, max_turns=8, prefill=prefill, drafter=drafter
    )


def make_turn(name: str, ids: I64, temperature: float = 0.0, seed: int = 1, max_tokens: int = WANTED) -> Turn:
    sampling = Sampling(temperature=temperature, top_p=0.95, seed=seed, max_tokens=max_tokens)
    return Turn(id=name, prompt=Prompt(ids=tuple(ids.tolist())), sampling=sampling)


def start(engine: ReferenceEngine, *turns: Turn) -> dict[str, list[int]]:
    for turn in turns:
        attach(engine, turn)
    ranges = tuple(PrefillRange(turn.id, 0, len(turn.prompt.ids)) for turn in turns)
    return {result.turn: list(result.ids) for result in engine.run(StepPlan(prefill=ranges))}


def run(engine: ReferenceEngine, *turns: Turn, drafts: int = 0) -> dict[str, list[int]]:
    """Tokens of every turn."""
    replies, live = start(engine, *turns), {turn.id for turn in turns}
    while live:
        for result in engine.run(StepPlan(decode=tuple(sorted(live)), drafts=drafts)):
            replies[result.turn] += result.ids
            assert result.accepted <= result.drafted <= drafts
            live -= {result.turn} if result.finish else set()
    return replies


def cache_bytes(engine: ReferenceEngine, turn: str, length: int) -> bytes:
    cache = engine._turns[turn].cache
    cache.truncate(length)
    return cache.global_bytes()


@pytest.fixture(scope="module")
def plain(model: Model, ids: I64) -> tuple[list[int], bytes]:
    engine = make_engine(model, None)
    reply = run(engine, make_turn("a", ids[:61]))["a"]
    return reply, cache_bytes(engine, "a", 61 + WANTED - 1)


@pytest.mark.parametrize("right", [[5], [0], [4], [1], [2, 3], [0, 5, 1, 4], [3, 0, 0, 2, 5]], ids=str)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 5])
def test_truth_and_mistakes_at_every_place(
    model: Model, ids: I64, plain: tuple[list[int], bytes], right: list[int], depth: int
) -> None:
    engine = make_engine(model, Planned(plain[0], 61, right, model.config.vocab_size))
    assert run(engine, make_turn("a", ids[:61]), drafts=depth)["a"] == plain[0]
    assert cache_bytes(engine, "a", 61 + WANTED - 1) == plain[1]


@pytest.mark.parametrize("depth", [1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, SIZE)), SIZE])
def test_noise_and_the_head_change_nothing(
    model: Model, ids: I64, plain: tuple[list[int], bytes], head: HeadDrafter, depth: int
) -> None:
    for drafter in (Noise(model.config.vocab_size), head):
        engine = make_engine(model, drafter)
        assert run(engine, make_turn("a", ids[:61]), drafts=depth)["a"] == plain[0]
        assert cache_bytes(engine, "a", 61 + WANTED - 1) == plain[1]


@pytest.mark.parametrize("length", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (15, 16, 17)), 62])
def test_replay_with_drafts_equals_replay_without(model: Model, ids: I64, head: HeadDrafter, length: int) -> None:
    turn = make_turn("a", ids[:length], max_tokens=24)
    expected = run(make_engine(model, None, "replay"), turn)
    assert run(make_engine(model, head, "replay"), turn, drafts=5) == expected


def test_drafts_may_change_from_step_to_step(model: Model, ids: I64, plain: tuple[list[int], bytes]) -> None:
    engine = make_engine(model, Planned(plain[0], 61, [5, 2], model.config.vocab_size))
    reply = start(engine, make_turn("a", ids[:61]))["a"]
    result: StepResult | None = None
    for step in range(WANTED):
        [result] = engine.run(StepPlan(decode=("a",), drafts=(0, 3, 5, 1)[step % 4]))
        reply += result.ids
        if result.finish:
            break
    assert reply == plain[0]


def test_steps_without_drafts_feed_the_draft_head_too(model: Model, ids: I64, head: HeadDrafter) -> None:
    """After any mixture of steps with and without, its context is that of a turn that never drafted."""
    contexts = []
    for pattern in ((0,), (0, 5, 0, 0, 3), (5,)):
        engine = make_engine(model, head)
        start(engine, make_turn("a", ids[:61]))
        attached = engine._turns["a"]
        while not attached.ended:
            drafts = pattern[attached.generated % len(pattern)]
            engine.run(StepPlan(decode=("a",), drafts=drafts))
        assert attached.cache.drafted == attached.cache.length == 61 + WANTED - 1
        rows = range(attached.cache.length - model.config.window_size, attached.cache.length)
        contexts.append([ring.read(rows.start, rows.stop) for ring in attached.cache.draft_windows])
    assert np.array_equal(contexts[1], contexts[0])
    assert np.array_equal(contexts[2], contexts[0])


def test_draft_context_is_the_same_however_it_was_fed(model: Model, ids: I64, head: HeadDrafter) -> None:
    """Blocks proposed behind a text do not depend on whether its tokens came by prefill, by decode or in chunks."""
    blocks = []
    for chunk in (70, 13, 1):
        cache = model.new_cache()
        for first in range(0, 70, chunk):
            output = model.forward([(cache, ids[first : min(first + chunk, 70)])])
            head.feed(cache, first, output.taps)
        blocks.append(head.propose([Anchor(cache, 5, make_turn("a", ids[:2]).sampling)], SIZE))
    assert all(np.array_equal(block.logits, blocks[0].logits) for block in blocks)


def test_a_gap_in_the_context_starts_it_anew(model: Model, ids: I64, head: HeadDrafter) -> None:
    """After a replayed prefill there are rows for the tail alone; what the ring held before must not be read."""
    fresh, used = model.new_cache(), model.new_cache()
    taps = model.forward([(fresh, ids[:100])]).taps
    model.forward([(used, ids[:100])])
    head.feed(used, 0, taps[:50] + 1)
    for cache in (fresh, used):
        head.feed(cache, 95, taps[95:])
    sampling = make_turn("a", ids[:2]).sampling
    first, second = (head.propose([Anchor(cache, 5, sampling)], SIZE) for cache in (fresh, used))
    assert np.array_equal(first.logits, second.logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_turn_does_not_depend_on_its_batch(model: Model, ids: I64, head: HeadDrafter, temperature: float) -> None:
    turns = [make_turn(str(n), ids[n : 40 + 3 * n], temperature, seed=n, max_tokens=16) for n in range(3)]
    together = run(make_engine(model, head), *turns, drafts=5)
    for turn in turns:
        assert run(make_engine(model, head), turn, drafts=5)[turn.id] == together[turn.id]


@pytest.mark.parametrize("prompt", [84, 85, 88])
def test_a_round_writes_no_further_than_the_layout_says(model: Model, ids: I64, prompt: int) -> None:
    """Across the end of a page; a page fewer than the layout asks for is refused."""
    cold = run(make_engine(model, None), make_turn("a", ids[:prompt]))["a"]
    engine = make_engine(model, Planned(cold, prompt, [5, 5, 5, 5, 5, 5, 1, 5], model.config.vocab_size))
    assert engine.layout.overrun_tokens == SIZE - 1
    turn = make_turn("a", ids[:prompt])
    wanted = engine.layout.pages_for(prompt + WANTED + SIZE - 1)
    assert wanted == (1 if prompt + WANTED + SIZE - 1 <= 128 else 2)
    with pytest.raises(ContextTooLong, match="pages hold"):
        engine.attach(turn, range(wanted - 1))
    assert run(engine, turn, drafts=5)["a"] == cold
    assert engine._turns["a"].cache.reach == prompt + WANTED + SIZE - 1


@pytest.mark.parametrize("stop_at", [0, 1, 7, 20])
def test_the_end_of_sentence_inside_a_block_ends_the_turn(
    model: Model, ids: I64, plain: tuple[list[int], bytes], stop_at: int
) -> None:
    engine = make_engine(model, Planned(plain[0], 61, [5], model.config.vocab_size))
    engine.facts = msgspec.structs.replace(engine.facts, eos_id=plain[0][stop_at])
    attach(engine, make_turn("a", ids[:61]))
    [result] = engine.run(StepPlan(prefill=(PrefillRange("a", 0, 61),)))
    reply = list(result.ids)
    while result.finish is None:
        [result] = engine.run(StepPlan(decode=("a",), drafts=5))
        reply += result.ids
    assert result.finish == "stop"
    assert reply == plain[0][: plain[0].index(plain[0][stop_at])]


@pytest.mark.parametrize("confidence", [*(pytest.param(n, marks=pytest.mark.full) for n in (0.2, 0.99)), 0.5])
def test_a_confidence_bound_shortens_and_changes_no_greedy_token(
    model: Model, ids: I64, plain: tuple[list[int], bytes], confidence: float
) -> None:
    drafter = Noise(model.config.vocab_size)
    engine = make_engine(model, drafter)
    engine.speculation = Speculation(confidence=confidence)
    assert run(engine, make_turn("a", ids[:61]), drafts=5)["a"] == plain[0]


@pytest.mark.parametrize("rule", get_args(AcceptanceRule))
@pytest.mark.parametrize(
    "drift",
    [
        pytest.param(6.0, marks=pytest.mark.full, id="noise"), pytest.param(0.5, id="near"),
        pytest.param(0.0, marks=pytest.mark.full, id="same"),
    ],
)  # fmt: skip
def test_sampled_tokens_follow_the_target(model: Model, rule: AcceptanceRule, drift: float) -> None:
    """Chi-square over many seeds of the first two tokens against the target, with drafts of three qualities."""
    rng, vocabulary, seeds = np.random.default_rng(3), 6, 3000
    target = rng.standard_normal((3, vocabulary)).astype(np.float32)
    drafted = target[:2] + drift * rng.standard_normal((2, vocabulary)).astype(np.float32)
    counts = np.zeros((vocabulary, vocabulary))
    cache = model.new_cache()
    for seed in range(seeds):
        sampling = Sampling(temperature=0.9, top_p=1.0, seed=seed, max_tokens=3)
        drafts = np.array([choose(row, sampling, 1 + slot, "draft") for slot, row in enumerate(drafted)])
        ids = resolve(target, drafted, drafts, Anchor(cache, 0, sampling), 0, Speculation(rule=rule))
        # A round that kept nothing goes on in the next one, which draws from the row after its token.
        second = ids[1] if len(ids) > 1 else choose(target[1], sampling, 2)
        counts[ids[0], second] += 1
    rows = [distribution(row, sampling) for row in target[:2]]
    expected = np.outer(*rows) * seeds
    used = expected > 5
    chi_square = float(((counts - expected) ** 2 / expected)[used].sum())
    assert chi_square < used.sum() + 4.5 * np.sqrt(2 * used.sum())

"""Teacher-forced checks: what counts as exact, and how many steps decoding takes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.nano.exactness import Question, judge, sample, summarise, walk  # noqa: E402
from bench.nano.graphs import Passes  # noqa: E402
from bench.nano.optimiser import Optimiser  # noqa: E402
from bench.nano.stages import FULL, PLAIN, Pass  # noqa: E402
from tests.nano.stand_in import METRICS, VOCABULARY, StandIn  # noqa: E402

BUCKETS = {"short": (2, 16), "middle": (1, 64)}
SHORT, MIDDLE = Pass("short", FULL), Pass("middle", FULL)


def count_up(kind: str, prompt: int, answer: int, wrong_at: int | None = None) -> Question:
    """Numbers that go up by one; `wrong_at` of the answer breaks the rule."""
    ids = np.arange(4, 4 + prompt + answer, dtype=np.int32) % VOCABULARY
    if wrong_at is not None:
        ids[prompt + wrong_at :] = (ids[prompt + wrong_at :] + 7) % VOCABULARY
    return Question(kind, ids[:prompt], ids[prompt:])


@pytest.fixture
def work() -> Passes:
    """A model that adds one, exactly."""
    model = StandIn(width=VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.copy_(torch.eye(VOCABULARY))
        model.head.copy_(torch.roll(torch.eye(VOCABULARY), 1, dims=0))
    passes = Passes(model, Optimiser(model.named_parameters(), [model.bias]), BUCKETS, 4, len(METRICS), lambda: None)
    for item in (SHORT, MIDDLE):
        passes.prepare(item)
    return passes


def test_exact_and_not(work: Passes) -> None:
    checks = [
        count_up("right", 5, 6),
        count_up("wrong at the start", 5, 6, wrong_at=0),
        count_up("wrong at the end", 5, 6, wrong_at=5),
        count_up("right", 20, 30),
        count_up("too long", 60, 10),
    ]
    figures = summarise(judge(work, [SHORT, MIDDLE], checks))
    assert figures["right"][:2] == (2, 1.0)
    assert figures["wrong at the start"].exact == figures["wrong at the end"].exact == 0.0
    assert "too long" not in figures


def test_steps_of_an_exact_answer_are_the_fewest(work: Passes) -> None:
    """Every draft holds: of 30 tokens one comes with the prompt, and 29 take five steps of six."""
    verdict = judge(work, [SHORT, MIDDLE], [count_up("right", 20, 30)])[0]
    assert (verdict.tokens, verdict.steps) == (29, 5)


def test_a_pass_without_the_draft_judges_none(work: Passes) -> None:
    plain = Pass("middle", PLAIN)
    work.prepare(plain)
    verdict = judge(work, [plain], [count_up("right", 20, 30)])[0]
    assert verdict.exact and verdict.steps == 0
    assert summarise([verdict])["right"].tokens_per_step == 0.0


def test_checks_leave_weights_and_counts_alone(work: Passes) -> None:
    before = work.optimiser.masters.clone()
    judge(work, [SHORT], [count_up("right", 5, 6)])
    assert torch.equal(before, work.optimiser.masters)
    assert not work.read()["seen"].any()


def test_walk_accepts_and_jumps() -> None:
    assert walk(np.array([2, 0, 0, 1, 0, 0]), 6) == 2  # 0 -> 3 -> 5
    assert walk(np.zeros(6, int), 6) == 5
    assert walk(np.array([0]), 1) == 0


def test_sample_takes_the_first_of_each_kind() -> None:
    checks = [count_up("a", 1, 1), count_up("a", 2, 1), count_up("b", 1, 1)]
    assert sample(checks, {"a": 1}, 5) == [checks[0], checks[2]]

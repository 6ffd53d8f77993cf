"""What is asked in which way, what belongs together, and when a reply is right."""

from typing import NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from bench.nano.data.checks import list_kinds
from bench.nano.interview import Ids, Reply
from bench.nano.trials import RANKS, Trial, judge, plan_trials

EOS, THINK_END = 1, 2


class Asked(NamedTuple):
    """A check."""

    kind: str
    thinking: bool
    prompt: Ids
    answer: Ids


TEXT = tuple(range(10, 310))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A word an id."""
    words = {"a": 0, "<eos>": EOS, "</think>": THINK_END, '{"b": 3}': 3, "c": 4}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("</think>", special=True)])
    return tokenizer


def test_questions_about_one_text_are_one_trial() -> None:
    """And those of another text another, in every way of the kind."""
    other = tuple(range(400, 700))
    checks = [Asked("needle.128", False, (*text, n), (7, EOS)) for text in (TEXT, other) for n in range(3)]
    trials = plan_trials(checks, EOS)
    assert [(trial.ways, len(trial.questions)) for trial in trials] == [
        (ways, 3) for _ in range(2) for ways in (("replay", "resume", "pages"), ("exact",))
    ]  # what shares its prefill is one trial, too
    assert trials[0].questions[0].answer == (7,)
    assert trials[0].questions[0].sampling.temperature == 0


def test_conversations_are_one_trial() -> None:
    """A turn that goes on behind the true reply belongs to the one before; a new conversation does not."""
    first = Asked("needle.turns.128", False, TEXT, (7, EOS))
    second = Asked("needle.turns.128", False, (*TEXT, 7, EOS, 5), (8, EOS))
    trials = plan_trials([first, second, first, second], EOS, ["replay", "resume"])
    assert [(trial.ways, len(trial.questions)) for trial in trials] == 2 * [(("replay",), 2), (("resume",), 2)]


def test_questions_of_their_own() -> None:
    """Prompts that begin differently are trials by themselves; one that thinks is drawn, once a seed where learnt."""
    checks = [Asked("line.3", False, (n,) * 80, (7, EOS)) for n in range(2)]
    assert [len(trial.questions) for trial in plan_trials(checks, EOS, ["replay"])] == [1, 1]
    drawn = plan_trials([Asked("tetris", True, TEXT, (7, EOS))], EOS)
    samplings = [question.sampling for trial in drawn for question in trial.questions]
    assert {trial.ways for trial in drawn} == {("replay",)}
    assert len({sampling.seed for sampling in samplings}) == 10
    assert {sampling.temperature for sampling in samplings} == {1.0}


@pytest.mark.parametrize(
    ("thinking", "ids", "finish", "right", "parses"),
    [
        (False, (3,), "stop", True, True),
        (False, (3,), "length", False, True),
        (False, (4,), "stop", False, False),
        (False, (3, 4), "stop", False, False),
        (True, (4, 0, THINK_END, 3), "stop", True, True),
        (True, (THINK_END, 3), "stop", True, True),
        (True, (3,), "stop", False, False),
        (True, (4, THINK_END, 4), "stop", False, False),
    ],
)
def test_marks(tokenizer: Tokenizer, thinking: bool, ids: Ids, finish: str, right: bool, parses: bool) -> None:
    """Right is the true answer to the last token, ended by itself; thoughts are free, but they must end."""
    [trial, *_] = plan_trials([Asked("json", thinking, TEXT, (3, EOS))], EOS, ["replay"])
    marks = judge(trial, trial.questions[0], Reply(ids, finish, 1, 0.0), tokenizer)  # type: ignore[arg-type]
    assert (marks.right, marks.stopped, marks.parses) == (right, finish == "stop", parses)


def test_cost_counts_a_shared_text_once() -> None:
    """What is computed once costs once; an exact prefill costs more."""

    def cost(count: int, way: str) -> float:
        checks = [Asked("needle.128", False, (*TEXT, n), (7, EOS)) for n in range(count)]
        [trial] = plan_trials(checks, EOS, [way])  # type: ignore[list-item]
        assert isinstance(trial, Trial)
        return trial.cost

    assert cost(2, "replay") < 2 * cost(1, "replay")
    assert cost(1, "exact") > cost(1, "replay")


def test_what_a_checkpoint_must_do_goes_first() -> None:
    """Figures that are only told come behind, whatever they cost; every rank has kinds that exist."""
    kinds = ["repeat", "needle.32768", "tetris.thinking", "tool.short.thinking", "needle.512", "memorised.variant"]
    ranks = {kind: plan_trials([Asked(kind, False, TEXT, (7, EOS))], EOS)[0].rank for kind in kinds}
    assert ranks["needle.512"] == ranks["tetris.thinking"] == 0
    assert ranks["needle.32768"] == ranks["tool.short.thinking"] == 1
    assert ranks["repeat"] == ranks["memorised.variant"] == 2
    short = plan_trials([Asked("tool.short", False, TEXT, (7, EOS))], EOS)
    assert [(trial.ways, trial.rank) for trial in short] == [(("replay",), 0), (("exact",), 1)]
    assert {kind for rank in RANKS for kind in rank} <= set(list_kinds())

"""What is measured of a small model: held-back questions, in the ways in which an engine may come to answer them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, Protocol

import msgspec
from tokenizers import Tokenizer

from bench.nano.interview import Ids, Question, Reply, Start, follows, measure_shared
from dsuf.reference.model import PrefillMode
from dsuf.types import Sampling

SEEDS = 10
"""Draws of a reply with thinking to the longest prompts' worth of text, which is sampled at temperature 1."""
SPARE_TOKENS = 32
"""A reply may be longer than the true one by so much before it is cut; one that thinks, by `THOUGHT_TOKENS` more."""
THOUGHT_TOKENS = 400
LEAST_SHARED = 256
"""Prompts that begin alike for fewer positions are computed each by itself."""
MOST_TOGETHER = 10
"""More questions about one text are several trials, for other processes to take."""

FAR_TOKENS = 16384
"""Behind a prompt of so many a token costs about twice as much."""
DRAFTED, PLAIN = 16, 50
"""A reply's token with drafts and without, in tokens of a prefill."""

WayName = Literal["exact", "plain", "replay", "resume", "pages"]


class Way(NamedTuple):
    """How an engine comes to its answer: mode of the prefill, where it starts from, and drafts a step."""

    prefill: PrefillMode
    start: Start
    drafts: int


WAYS: dict[WayName, Way] = {
    "exact": Way("exact", "cold", 5),  # every layer on every token of the prompt
    "plain": Way("exact", "cold", 0),  # the same without drafts
    "replay": Way("replay", "cold", 5),  # as `bin/serve` prefills by default
    "resume": Way("replay", "state", 5),  # from a host copy of pages and state
    "pages": Way("replay", "pages", 5),  # from pages alone, the last window computed again
}

# The ways for a kind, by how its name begins; the first that fits. An exact prefill of the longest texts takes minutes.
_WAYS_OF: dict[str, tuple[WayName, ...]] = {
    "tetris": ("plain", "exact", "replay"),
    "memorised.variant": ("replay",),
    "memorised": ("plain", "exact", "replay"),
    "needle.turns": ("replay", "resume"),
    "needle.plain": ("replay",),
    "needle.32768": ("replay", "resume"),
    "needle": ("replay", "resume", "pages", "exact"),
    "line.quoted.6": ("replay", "exact"),
    "tool.short": ("replay", "exact"),
    "": ("replay",),
}

RANKS = (
    ("tetris", "tetris.thinking", "tool.short", "tool.client", "memorised", "json",
     "needle.512", "needle.2048", "needle.8192", "needle.turns.1024", "needle.turns.6144",
     *(f"line.quoted.{count}" for count in (3, 4, 6, 8, 12))),
    ("needle.32768", "line.client", "tool.short.thinking", "line.quoted.24", "tool.behind.6000",
     "tool.behind.1500", "tool.unseen"),
)  # fmt: skip
"""Kinds that a checkpoint must know, then those whose figures are told; others come last."""


class Check(Protocol):
    """A held-back prompt and its true answer, the end-of-sentence token included; with `thinking` what the reply has
    before `</think>` is its own business."""

    @property
    def kind(self) -> str:
        """What is asked for, such as `needle.2048`."""

    @property
    def thinking(self) -> bool:
        """Whether the model thinks first."""

    @property
    def prompt(self) -> Iterable[int]:
        """Ids up to the model's turn."""

    @property
    def answer(self) -> Iterable[int]:
        """Ids of the answer."""


class Trial(msgspec.Struct, frozen=True):
    """Questions that are put to one engine one after the other, since they begin alike; in `ways` that may read what
    they share together."""

    kind: str
    ways: tuple[WayName, ...]
    thinking: bool
    questions: tuple[Question, ...]

    @property
    def cost(self) -> float:
        """About how many prompt tokens' worth of work it is, an exact prefill's share by the square included."""
        prompts = [len(question.prompt) for question in self.questions]
        shared = measure_shared([question.prompt for question in self.questions])
        read = shared + sum(prompts) - shared * len(prompts)
        way = WAYS[self.ways[0]]
        per_token = (3 if way.prefill == "exact" else 1) * (1 + max(prompts) / FAR_TOKENS)
        per_reply = sum(len(question.answer) + 32 for question in self.questions)
        return per_token * read + (DRAFTED if way.drafts else PLAIN) * per_reply * len(self.ways)

    @property
    def rank(self) -> int:
        """Which trials go first: 0 for what a checkpoint must do, then what is to be told, then the rest."""
        rank = next((rank for rank, kinds in enumerate(RANKS) if self.kind in kinds), len(RANKS))
        told = WAYS[self.ways[0]].prefill == "exact" and not self.kind.startswith(("tetris", "needle"))
        return max(rank, 1) if told else rank


class Marks(msgspec.Struct, frozen=True):
    """How a reply was: `right` to the last token, its end included; `stopped` by itself; `parses` as JSON."""

    right: bool
    stopped: bool
    parses: bool


def plan_trials(checks: Iterable[Check], eos_id: int, ways: Sequence[WayName] = tuple(WAYS)) -> list[Trial]:
    """All trials of `checks`, in their order; of the ways of a kind those in `ways`."""
    trials = []
    for (kind, thinking), alike in groupby(checks, key=lambda check: (check.kind, bool(check.thinking))):
        questions = [_make_question(check, eos_id) for check in alike]
        for group in _group(_draw(questions, thinking, kind)):
            wanted = [way for way in _list_ways(kind, thinking) if way in ways]
            trials += [Trial(kind, some, thinking, tuple(group)) for some in _join(wanted, group)]
    return trials


def judge(trial: Trial, question: Question, reply: Reply, tokenizer: Tokenizer) -> Marks:
    """Marks of `reply`; of one that thinks only what follows `</think>` counts."""
    said: Ids | None = reply.ids
    if trial.thinking:
        end = tokenizer.token_to_id("</think>")
        said = reply.ids[reply.ids.index(end) + 1 :] if end in reply.ids else None
    stopped = reply.finish == "stop"
    text = "" if said is None else tokenizer.decode(list(said), skip_special_tokens=False)
    return Marks(right=stopped and said == question.answer, stopped=stopped, parses=_is_json(text))


def _make_question(check: Check, eos_id: int) -> Question:
    """A question of the check, drawn at temperature 1 if it thinks, else greedy."""
    prompt, answer = tuple(map(int, check.prompt)), tuple(map(int, check.answer))
    if answer[-1:] == (eos_id,):
        answer = answer[:-1]
    spare = SPARE_TOKENS + (THOUGHT_TOKENS if check.thinking else 0)
    temperature = 1.0 if check.thinking else 0.0
    sampling = Sampling(temperature=temperature, top_p=1.0, seed=0, max_tokens=len(answer) + spare)
    return Question(prompt, answer, sampling)


def _draw(questions: list[Question], thinking: bool, kind: str) -> list[Question]:
    """Each question as often as it is asked: what is sampled and learnt by heart, under several seeds."""
    seeds = SEEDS if thinking and kind.startswith("tetris") else 1
    return [
        question._replace(sampling=msgspec.structs.replace(question.sampling, seed=seed + 100 * place))
        for place, question in enumerate(questions)
        for seed in range(seeds)
    ]


def _group(questions: list[Question]) -> Iterator[list[Question]]:
    """Runs of questions of one conversation, or of prompts that share most of their beginning."""
    group: list[Question] = []
    for question in questions:
        if group and not _belongs(group, question):
            yield group
            group = []
        group.append(question)
    if group:
        yield group


def _belongs(group: list[Question], question: Question) -> bool:
    if follows(group[-1], question):
        return len(group) == 1 or follows(group[-2], group[-1])
    if len(group) >= MOST_TOGETHER or (len(group) > 1 and follows(group[0], group[1])):
        return False
    shared = measure_shared([group[0].prompt, question.prompt])
    return shared >= LEAST_SHARED and 2 * shared >= max(len(group[0].prompt), len(question.prompt))


def _join(ways: Sequence[WayName], group: Sequence[Question]) -> list[tuple[WayName, ...]]:
    """The ways that share the reading of one text; of a conversation or a single question each for itself."""
    if all(map(follows, group, group[1:])):
        return [(way,) for way in ways]
    return [tuple(some) for _, some in groupby(ways, key=lambda way: (WAYS[way].prefill, WAYS[way].drafts))]


def _list_ways(kind: str, thinking: bool) -> tuple[WayName, ...]:
    """The ways for a kind. A sampled reply is drawn once a seed, as it is by default."""
    if thinking:
        return ("replay",)
    return next(ways for start, ways in _WAYS_OF.items() if kind.startswith(start))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

"""Teacher-forced checks: which answers greedy decoding would give exactly, and with how many tokens a step.

Prompt and true answer stand in one row of a bucket; an answer is exact when every arg-max on it is right. Drafts are
judged at every place of an answer, then walked as decoding would: accept, jump, count. The captured passes of training
serve, without a step of the optimiser behind them, so that nothing is compiled for the checks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.nano.graphs import DRAFT_ROWS, Passes
from bench.nano.stages import Pass

PAD = 2


class Question(NamedTuple):
    """A held-back prompt [tokens], with the thoughts before the answer if there are any, and its answer [tokens]."""

    kind: str
    prompt: np.ndarray
    answer: np.ndarray


class Verdict(NamedTuple):
    """One check: its kind, whether every token was right, answer tokens and decoding steps (0: no draft judged)."""

    kind: str
    exact: bool
    tokens: int
    steps: int


class Figure(NamedTuple):
    """All checks of a kind."""

    count: int
    exact: float
    tokens_per_step: float


def judge(passes: Passes, available: Iterable[Pass], checks: Iterable[Question]) -> list[Verdict]:
    """Run checks through the shortest available bucket that holds them; those that none holds are left out."""
    by_length = sorted(available, key=lambda item: (passes.buckets[item.bucket][1], item.mode.dense))
    grouped: dict[Pass, list[Question]] = {}
    for check in checks:
        length = len(check.prompt) + len(check.answer)
        fitting = next((item for item in by_length if passes.buckets[item.bucket][1] >= length), None)
        if fitting is not None:
            grouped.setdefault(fitting, []).append(check)
    verdicts: list[Verdict] = []
    for item, members in grouped.items():
        rows = passes.buckets[item.bucket][0]
        for start in range(0, len(members), rows):
            verdicts += _judge_batch(passes, item, members[start : start + rows])
    passes.read()
    return verdicts


def summarise(verdicts: Iterable[Verdict]) -> dict[str, Figure]:
    """By kind, in the order of first appearance."""
    grouped: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        grouped.setdefault(verdict.kind, []).append(verdict)
    figures = {}
    for kind, members in grouped.items():
        steps = sum(v.steps for v in members)
        walked = sum(v.tokens for v in members if v.steps)
        exact = sum(v.exact for v in members) / len(members)
        figures[kind] = Figure(len(members), exact, walked / steps if steps else 0.0)
    return figures


def sample(checks: Sequence[Question], limits: Mapping[str, int], default: int) -> list[Question]:
    """The first checks of each kind, at most `limits[kind]` (else `default`) of them."""
    taken: dict[str, int] = {}
    chosen = []
    for check in checks:
        taken[check.kind] = taken.get(check.kind, 0) + 1
        if taken[check.kind] <= limits.get(check.kind, default):
            chosen.append(check)
    return chosen


def walk(accepted: np.ndarray, tokens: int) -> int:
    """Steps that decoding takes for an answer of `tokens`, the first of which comes with the prompt.

    `accepted[i]` is how many drafts hold behind answer token i.
    """
    at = steps = 0
    while at < tokens - 1:
        at += int(accepted[at]) + 1
        steps += 1
    return steps


def _judge_batch(passes: Passes, item: Pass, checks: Sequence[Question]) -> list[Verdict]:
    """Checks one a row; the draft is judged in as many runs as its anchors need."""
    rows, length = passes.buckets[item.bucket]
    ids = np.full((rows, length), PAD, np.int32)
    weights = np.zeros((rows, length), np.float32)
    wanted: list[int] = []
    for row, check in enumerate(checks):
        text = np.concatenate([check.prompt, check.answer])
        ids[row, : len(text)] = text
        weights[row, len(check.prompt) - 1 : len(text) - 1] = 1.0
        first = row * length + len(check.prompt)
        wanted += range(first, first + len(check.answer) - 1)
    anchors = np.array(wanted or [1], np.int64)
    accepted = np.zeros(rows * length, np.int64)
    labels = np.zeros((rows, length), np.uint8)
    chunks = [anchors[i : i + passes.anchors] for i in range(0, len(anchors), passes.anchors)]
    for chunk in chunks if item.mode.draft else chunks[:1]:
        filled = np.resize(chunk, passes.anchors)
        passes.run(item, ids, weights, labels, filled)
        right, draft_right = passes.hits(item)
        accepted[filled] = np.cumprod(draft_right[:, :DRAFT_ROWS].astype(np.int64), axis=1).sum(axis=1)
    return [
        _judge_row(check, right[row], accepted.reshape(rows, length)[row], item.mode.draft)
        for row, check in enumerate(checks)
    ]


def _judge_row(check: Question, right: np.ndarray, accepted: np.ndarray, drafts: bool) -> Verdict:
    start, tokens = len(check.prompt), len(check.answer)
    exact = bool(right[start - 1 : start - 1 + tokens].all())
    # A draft behind the end of the answer is neither right nor wrong.
    left = np.arange(tokens - 1, -1, -1)
    kept = np.minimum(accepted[start : start + tokens], left)
    return Verdict(check.kind, exact, tokens - 1, walk(kept, tokens) if drafts and tokens > 1 else 0)

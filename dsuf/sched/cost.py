"""What a step costs: a linear model, fitted to the steps that were measured.

seconds = step + row * rows + draft * rows * drafts + token * prefill tokens + replay * replayed tokens. The last term
is there since a replayed prefill runs the upper layers only over the last window of a prompt, in its last chunk.
"""

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

FORGET = 0.97
"""Weight of a measured step relative to the one of its kind after it: the last thirty or so of each kind count."""
FADE = 0.998
"""What is left of a kind's weight with each step of another kind; what nobody contradicts stays."""
PACE = 0.2
"""How fast the model follows a machine that slows down or recovers as a whole."""
LEAST_EXCESS = 1.25
LEAP = 4
"""Beside streams no chunk is more than so many times as long as the longest one that was measured."""
OUTLIER = 3.0
"""A step that takes more than so many times what its kind did counts as that: one pause must not shrink every chunk."""
_TRUSTED_STEPS = 3
_EAGER_STEPS = 64  # from here on a new fit every few steps is enough
_REFIT_STEPS = 4
_FAINTEST = 1e-3
_TOKENS = 64.0  # unit of prefill tokens in the fit, so that all columns are of one order
_RIDGE = 1e-8

_Kind = tuple[int, bool, int, bool]
_Floats = NDArray[np.float64]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a plan its time depends on: decode rows, drafts a row, prefill tokens, and the tokens of
    them, or before them, that a prompt's end replays."""

    rows: int = 0
    drafts: int = 0
    tokens: int = 0
    replayed: int = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step, and for each of its parts; none is negative. All zero: nothing is known yet.

    `excess` is by what factor a step with a chunk may well exceed what is expected of it, `known_tokens` the longest
    chunk of which that can be said.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    draft_s: float = 0.0
    token_s: float = 0.0
    replay_s: float = 0.0
    excess: float = LEAST_EXCESS
    known_tokens: int = 1 << 30

    def predict_s(self, shape: Shape) -> float:
        """Seconds that a step of this shape takes."""
        rows_s = shape.rows * (self.row_s + self.draft_s * shape.drafts)
        return self.step_s + rows_s + self.token_s * shape.tokens + self.replay_s * shape.replayed


class _Kept:
    """The latest steps of one kind, how many there were, and when the last one was."""

    def __init__(self) -> None:
        self.squares, self.products = np.zeros((5, 5)), np.zeros(5)
        self.seconds, self.count, self.latest = 0.0, 0, 0

    def expect_s(self, row: _Floats, terms: _Floats) -> float:
        """What a step takes that differs little from those of its kind: their mean, corrected by the model."""
        mean_row = self.squares[0] / self.squares[0, 0]
        modelled_s = float(mean_row @ terms)
        correction = float(row @ terms) / modelled_s if modelled_s > 0 else 1.0
        return self.seconds / float(self.squares[0, 0]) * correction

    def add(self, row: _Floats, seconds: float, step: int) -> None:
        """A step took `seconds`."""
        self.count += 1
        self.squares = self.squares * FORGET + np.outer(row, row)
        self.products = self.products * FORGET + row * seconds
        self.seconds = self.seconds * FORGET + seconds
        self.latest = step

    def weight(self, step: int) -> float:
        """How much the kind counts: less if it was long ago, and errors of long steps for less than those of short."""
        return max(_FAINTEST, FADE ** (step - self.latest)) / self.seconds


class CostFit:
    """The model that fits the latest steps of each kind best: least squares without negative terms.

    Steps are kept by kind (how many rows, drafts or none, how many prompt tokens, in powers of two), so that an hour of
    one kind does not wipe out what another costs. Their times are taken relative to the pace of the machine, which is
    seen where steps of one and the same kind take longer or shorter than before.
    """

    def __init__(self) -> None:
        self.cost = Cost(known_tokens=0)
        self.steps = 0
        self._longest_tokens = 0
        self._pace = 1.0
        self._terms = np.zeros(5)
        self._kinds: dict[_Kind, _Kept] = {}
        self._excesses: deque[float] = deque(maxlen=64)

    def observe(self, shape: Shape, seconds: float) -> None:
        """A step of `shape` took `seconds`, more than 0."""
        row = np.array([1.0, shape.rows, shape.rows * shape.drafts, shape.tokens / _TOKENS, shape.replayed / _TOKENS])
        kind = (shape.rows.bit_length(), shape.drafts > 0, shape.tokens.bit_length(), shape.replayed > 0)
        kept = self._kinds.setdefault(kind, _Kept())
        if kept.count >= _TRUSTED_STEPS and (expected_s := kept.expect_s(row, self._terms)) > 0:
            seconds = min(seconds, OUTLIER * expected_s * self._pace)
            if shape.tokens:
                self._excesses.append(seconds / (expected_s * self._pace))
            self._pace += PACE * (seconds / expected_s - self._pace)
        self.steps += 1
        self._longest_tokens = max(self._longest_tokens, shape.tokens)
        kept.add(row, seconds / self._pace, self.steps)
        if self.steps < _EAGER_STEPS or self.steps % _REFIT_STEPS == 0:
            self._fit()
        step_s, row_s, draft_s, block_s, replay_s = (self._terms * self._pace).tolist()
        self.cost = Cost(
            step_s=step_s, row_s=row_s, draft_s=draft_s, token_s=block_s / _TOKENS, replay_s=replay_s / _TOKENS,
            excess=self._find_excess(), known_tokens=LEAP * self._longest_tokens,
        )  # fmt: skip

    def _fit(self) -> None:
        """Solve for the terms."""
        kinds = [(kept, kept.weight(self.steps)) for kept in self._kinds.values()]
        squares = np.sum([kept.squares * weight for kept, weight in kinds], axis=0)
        products = np.sum([kept.products * weight for kept, weight in kinds], axis=0)
        self._terms = solve(squares, products)

    def _find_excess(self) -> float:
        """What the last chunks went over their expectation by, without the two worst of them."""
        worst = sorted(self._excesses)[:-2]
        return max(LEAST_EXCESS, worst[-1]) if worst else LEAST_EXCESS


def solve(squares: _Floats, products: _Floats) -> _Floats:
    """The x >= 0 for which `x squares x - 2 products x` is least, almost: negative terms are set to 0 one by one.

    Terms that the steps so far do not tell apart share alike.
    """
    used = [i for i in range(len(products)) if squares[i, i] > 0]
    terms = np.zeros(len(products))
    while used:
        part = squares[np.ix_(used, used)]
        found = np.linalg.solve(part + np.eye(len(used)) * (_RIDGE * np.trace(part)), products[used])
        if found.min() >= 0:
            terms[used] = found
            break
        del used[int(np.argmin(found))]
    return terms

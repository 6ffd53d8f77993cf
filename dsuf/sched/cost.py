"""What a step costs: a linear model, fitted to the steps that were measured.

seconds = step + row * rows + draft * rows * drafts + token * prefill tokens + ending * prompts that end. The last term
is there since the end of a prompt costs more than its tokens: a replayed prefill runs the upper layers only there.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

FORGET = 0.97
"""Weight of a measured step relative to the one of its kind after it: the last fifty or so of each kind count."""
OUTLIER = 3.0
"""A step that takes more than so many times what was expected counts as that: one pause must not shrink every chunk."""
PACE = 0.15
"""How fast the model follows a machine that becomes faster or slower as a whole, which the fit takes long to see."""
TRUSTED_STEPS = 8
_EAGER_STEPS = 64  # from here on a new fit every few steps is enough
_REFIT_STEPS = 8
_TOKENS = 64.0  # unit of prefill tokens in the fit, so that all columns are of one order
_RIDGE = 1e-8

_Kind = tuple[bool, bool, bool]
_Floats = NDArray[np.float64]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a plan its time depends on: decode rows, drafts a row, prefill tokens, prompts that end."""

    rows: int = 0
    drafts: int = 0
    tokens: int = 0
    endings: int = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step, and for each of its parts; none is negative. All zero: nothing is known yet."""

    step_s: float = 0.0
    row_s: float = 0.0
    draft_s: float = 0.0
    token_s: float = 0.0
    ending_s: float = 0.0

    def predict_s(self, shape: Shape) -> float:
        """Seconds that a step of this shape takes."""
        rows_s = shape.rows * (self.row_s + self.draft_s * shape.drafts)
        return self.step_s + rows_s + self.token_s * shape.tokens + self.ending_s * shape.endings


class CostFit:
    """The model that fits the latest steps best: least squares without negative terms, where an error of a long step
    counts for less than that of a short one; all of it times the pace of the last few steps.

    Steps are forgotten kind by kind, so that an hour of decoding does not wipe out what prefill costs.
    """

    def __init__(self) -> None:
        self.cost = Cost()
        self.steps = 0
        self._terms = np.zeros(5)
        self._pace = 1.0
        self._sums: dict[_Kind, tuple[_Floats, _Floats]] = {}

    def observe(self, shape: Shape, seconds: float) -> None:
        """A step of `shape` took `seconds`, more than 0."""
        row = np.array([1.0, shape.rows, shape.rows * shape.drafts, shape.tokens / _TOKENS, shape.endings])
        if self.steps >= TRUSTED_STEPS and (expected_s := float(row @ self._terms)) > 0:
            seconds = min(seconds, OUTLIER * expected_s * self._pace)
            self._pace += PACE * (seconds / expected_s - self._pace)
        seconds /= self._pace
        self.steps += 1
        kind = (shape.rows > 0, shape.drafts > 0, shape.tokens > 0)
        squares, products = self._sums.get(kind, (np.zeros((5, 5)), np.zeros(5)))
        self._sums[kind] = (squares * FORGET + np.outer(row, row) / seconds, products * FORGET + row)
        if self.steps < _EAGER_STEPS or self.steps % _REFIT_STEPS == 0:
            self._fit()
        step_s, row_s, draft_s, block_s, ending_s = (self._terms * self._pace).tolist()
        self.cost = Cost(step_s=step_s, row_s=row_s, draft_s=draft_s, token_s=block_s / _TOKENS, ending_s=ending_s)

    def _fit(self) -> None:
        """Solve for the terms, at the pace that is kept apart."""
        squares, products = (np.sum([sums[i] for sums in self._sums.values()], axis=0) for i in (0, 1))
        self._terms = solve(squares, products)


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

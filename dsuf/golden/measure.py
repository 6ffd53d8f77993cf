"""How far computed rows are from recorded ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Distance(NamedTuple):
    """`errors` [rows]: norm of the difference over norm of the recorded row; `equal` [rows]: the same to the bit."""

    errors: NDArray[np.float64]
    equal: NDArray[np.bool_]

    @classmethod
    def between(cls, own: Array, recorded: Array) -> Self:
        """The distance of `own` from `recorded`, both [rows, ...].

        What is not a number, or of another shape, is infinitely far.
        """
        rows = len(recorded)
        if own.shape != recorded.shape:
            return cls(np.full(rows, np.inf), np.zeros(rows, np.bool_))
        a = np.asarray(own, np.float64).reshape(rows, -1)
        b = np.asarray(recorded, np.float64).reshape(rows, -1)
        equal = (a == b).all(axis=1)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            errors = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
        errors = np.where(np.isnan(errors), np.inf, errors)
        return cls(np.where(equal, 0.0, errors), equal)

    @classmethod
    def pooled(cls, parts: Sequence[Self]) -> Self:
        """The rows of all `parts` together."""
        return cls(np.concatenate([part.errors for part in parts]), np.concatenate([part.equal for part in parts]))

    @property
    def median(self) -> float:
        """Median error."""
        return float(np.median(self.errors)) if len(self.errors) else 0.0

    @property
    def largest(self) -> float:
        """Largest error."""
        return float(self.errors.max(initial=0.0))

    def __str__(self) -> str:
        return f"{self.median:.1e}/{self.largest:.1e}"


def count_equal(own: Array, recorded: Array) -> tuple[int, int]:
    """How many elements of `own` equal `recorded`, and how many there are; none do where the shapes differ."""
    if own.shape != recorded.shape:
        return 0, max(1, recorded.size)
    return int(np.count_nonzero(own == recorded)), recorded.size

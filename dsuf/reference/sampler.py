"""From logits to a token: arg-max, or a seeded draw from the tempered nucleus."""

from typing import Literal, get_args

import numpy as np

from dsuf.reference.arithmetic import F32, F64
from dsuf.types import Sampling

Purpose = Literal["token", "draft", "accept", "residual"]
"""What a random number is for. Purposes never share a stream: a draft must not know how it will be judged."""

_PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def choose(logits: F32, sampling: Sampling, position: int, purpose: Purpose = "token") -> int:
    """The token at `position` for its `logits` [vocabulary].

    Temperature 0 is the arg-max, the lowest id on ties. A seed gives the same token whatever else is in the batch: the
    draw depends on seed, position and purpose alone.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    return pick_by_mass(distribution(logits, sampling), uniform(sampling.seed, position, purpose))


def pick_by_mass(probabilities: F64, draw: float) -> int:
    """The token at which the sum of `probabilities` [vocabulary] passes `draw`, a number in [0, 1)."""
    # The last token with mass catches a draw beyond the sum of rounded probabilities.
    last = int(np.flatnonzero(probabilities)[-1])
    return min(last, int(np.searchsorted(np.cumsum(probabilities), draw, side="right")))


def distribution(logits: F32, sampling: Sampling) -> F64:
    """Probabilities [vocabulary] after temperature and top-p, float64.

    Top-p keeps the fewest most probable tokens whose sum reaches it (at least one; the lower id first among equals).
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    probabilities: F64 = weights / weights.sum()
    if sampling.top_p >= 1:
        return probabilities
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < sampling.top_p]
    nucleus = np.zeros_like(probabilities)
    nucleus[kept] = probabilities[kept]
    return np.asarray(nucleus / nucleus.sum())


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) that depends on its arguments alone, from a counter-based generator."""
    # In a list, a seed of 2^63 or more would pass through a float.
    key = np.array([seed % 2**64, 2**32 * _PURPOSES.index(purpose) + position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())

"""Which drafts are kept: rules under which a drafted reply has exactly the distribution of an undrafted one.

Row r of the target distributions `p` [drafts + 1, vocabulary] says what may follow after r drafts; row r of `q`
[drafts, vocabulary] is what draft r was drawn from. A rule keeps the first n drafts; the token after them is drawn from
`p[n]` less what the drafts had of it (`residual`), or from the last row of `p` if all are kept. Uniform numbers are
arguments.
"""

from typing import Literal

import numpy as np

from dsuf.reference.arithmetic import F64, I64

AcceptanceRule = Literal["token", "block"]


def keep_greedy(targets: I64, drafts: I64) -> int:
    """Drafts [k] that equal the target's arg-max [k + 1], up to the first that does not."""
    same = targets[: len(drafts)] == drafts
    return int(np.argmin(same)) if not same.all() else len(drafts)


def keep_by_token(p: F64, q: F64, drafts: I64, uniforms: F64) -> int:
    """Keep draft r while uniforms[r] < p[r, draft] / q[r, draft] (Leviathan et al. 2023, Chen et al. 2023)."""
    at = np.arange(len(drafts)), drafts
    kept = uniforms * q[at] < p[at]
    return int(np.argmin(kept)) if not kept.all() else len(drafts)


def keep_by_block(p: F64, q: F64, drafts: I64, uniforms: F64) -> int:
    """The longest prefix whose own test succeeds (Sun et al. 2024); never keeps less than the token rule on average.

    w_i = min(1, w_(i-1) · p / q) of the first i drafts; a prefix shorter than all is kept with probability
    R / (R + 1 - w_i), R the mass that w_i · p has over q at the next place; all of them with probability w_k.
    """
    kept = 0
    for i, w in enumerate(_prefix_weights(p, q, drafts), 1):
        chance = w
        if i < len(drafts):
            mass = float(np.maximum(w * p[i] - q[i], 0).sum())
            chance = mass / (mass + 1 - w) if mass + 1 - w > 0 else 1.0
        if uniforms[i - 1] <= chance:
            kept = i
    return kept


def _prefix_weights(p: F64, q: F64, drafts: I64) -> list[float]:
    """w_1 … w_k of the block rule."""
    weights, w = [], 1.0
    for r, draft in enumerate(drafts):
        w = min(1.0, w * float(p[r, draft]) / float(q[r, draft]))
        weights.append(w)
    return weights


def residual(rule: AcceptanceRule, p: F64, q: F64, drafts: I64, kept: int) -> F64:
    """The distribution [vocabulary] of the token after `kept` drafts; p's own row if rounding leaves nothing over."""
    if kept == len(drafts):
        return np.asarray(p[kept])
    weight = 1.0 if rule == "token" or kept == 0 else _prefix_weights(p, q, drafts)[kept - 1]
    left: F64 = np.maximum(weight * p[kept] - q[kept], 0)
    total = left.sum()
    return left / total if total > 0 else np.asarray(p[kept])


def keep(rule: AcceptanceRule, p: F64, q: F64, drafts: I64, uniforms: F64) -> int:
    """How many drafts `rule` keeps."""
    return (keep_by_token if rule == "token" else keep_by_block)(p, q, drafts, uniforms)

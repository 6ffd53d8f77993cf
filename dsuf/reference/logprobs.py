"""Log-probabilities: of chosen tokens, and of the likeliest at their places, under the model's own distribution."""

from collections.abc import Sequence

import numpy as np

from dsuf.reference.arithmetic import F32, F64
from dsuf.types import Logprob


def rate(logits: F32, ids: Sequence[int], top: int | None) -> tuple[Logprob, ...]:
    """For each of `ids` the logarithm of its probability under softmax(`logits` [len(ids) or more, vocabulary]), and
    the `top` likeliest tokens, the lower id first among equals; nothing where `top` is None.

    Temperature, nucleus and mask are left out, so that the figures are the same however a token was chosen.
    """
    if top is None:
        return ()
    return tuple(_rate_row(row.astype(np.float64), token, top) for row, token in zip(logits, ids, strict=False))


def _rate_row(logits: F64, token: int, top: int) -> Logprob:
    peak = logits.max()
    total = peak + np.log(np.exp(logits - peak).sum())
    likeliest = np.argsort(-logits, kind="stable")[:top] if top else ()
    return float(logits[token] - total), tuple((int(id_), float(logits[id_] - total)) for id_ in likeliest)

"""Attention of each query row over its own list of rows, with a sink in the denominator.

The softmax runs online over blocks of 64 slots, in slot order, as the released kernel does: probabilities stay float32
in the denominator and are rounded to BF16, relative to the running maximum, for the product with the values.
"""

import numpy as np

from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic

SLOTS_PER_BLOCK = 64
GATHERED_ELEMENTS = 1 << 22
"""Gathered key elements held at once; query rows are taken in blocks."""


def attend(q: F32, values: F64, slots: I64, sink: F32, arithmetic: Arithmetic) -> F32:
    """Outputs [rows, heads, width] of queries `q` [rows, heads, width].

    Row r attends to `values[slots[r]]` (key and value at once), slots of -1 left out; a row without slots gives zeros.
    `sink` [heads] adds exp(sink - maximum) to the denominator and nothing else.
    """
    out = np.empty_like(q)
    step = max(1, GATHERED_ELEMENTS // max(1, slots.shape[1] * q.shape[2]))
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        out[rows] = _attend_block(q[rows].astype(np.float64), values, slots[rows], sink, arithmetic)
    return arithmetic.act(out)


def _attend_block(q: F64, values: F64, slots: I64, sink: F32, arithmetic: Arithmetic) -> F32:
    scale = np.float32(q.shape[2] ** -0.5)
    maximum = np.full(q.shape[:2], -1e30, np.float32)
    denominator = np.zeros(q.shape[:2], np.float32)
    total = np.zeros(q.shape, np.float32)
    for first in range(0, slots.shape[1], SLOTS_PER_BLOCK):
        block = slots[:, first : first + SLOTS_PER_BLOCK]
        rows = values.take(block, axis=0, mode="wrap")  # [rows, slots, width]; slot -1 wraps, its score is masked
        score = np.matmul(q, rows.swapaxes(1, 2)).astype(np.float32) * scale
        score += np.where(block < 0, np.float32(-np.inf), np.float32(0))[:, None, :]
        raised = np.maximum(maximum, score.max(axis=2))
        probability = np.exp(score - raised[:, :, None])
        decay = np.exp(maximum - raised)
        # In float64: a float32 sum would depend on how many unused slots follow, and so on the chunk a row is in.
        denominator = denominator * decay + np.add.reduce(probability, axis=2, dtype=np.float64).astype(np.float32)
        weighted = np.matmul(arithmetic.act(probability).astype(np.float64), rows).astype(np.float32)
        total = total * decay[:, :, None] + weighted
        maximum = raised
    # A row without slots has a total of zero and the starting maximum, from which the sink would overflow.
    attended: F32 = total / (denominator + np.exp(np.minimum(sink - maximum, np.float32(80))))[:, :, None]
    return attended


def window_slots(positions: I64, first: int, floor: int, window: int) -> I64:
    """Slots [rows, window] into rows that begin at position `first`: the last `window` positions, oldest first.

    Positions below `floor` have no row. The unused slots of an early position are -1 at the end.
    """
    oldest = np.maximum(positions - (window - 1), floor)[:, None]
    position = oldest + np.arange(window)
    return np.where(position <= positions[:, None], position - first, -1)

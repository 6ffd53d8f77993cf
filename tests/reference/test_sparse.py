"""Sparse attention against a plain softmax in float64, and what must not matter to a row."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import F32, F64, FP32, I64, OFFICIAL
from dsuf.reference.indexer import candidate_mask, select
from dsuf.reference.sparse import attend, window_slots

ROWS, HEADS, WIDTH, VALUES = 9, 4, 32, 200
SINK = np.array([0.5, -1, 2, 0], np.float32)


def case(slots: int, seed: int = 0) -> tuple[F32, F64, I64]:
    """Queries, values and slots, some of them unused, the last row without any."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((ROWS, HEADS, WIDTH)).astype(np.float32)
    values = rng.standard_normal((VALUES, WIDTH)).astype(np.float32).astype(np.float64)
    chosen = rng.integers(0, VALUES, (ROWS, slots))
    chosen[rng.random((ROWS, slots)) < 0.2] = -1
    chosen[-1] = -1
    return q, values, chosen


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 200])
def test_equals_a_plain_softmax_with_a_sink(slots: int) -> None:
    q, values, chosen = case(slots)
    score = np.einsum("rhw,rsw->rhs", q.astype(np.float64), values[chosen]) * WIDTH**-0.5
    weight = np.where(chosen[:, None] < 0, 0, np.exp(score))
    expected = np.einsum("rhs,rsw->rhw", weight, values[chosen]) / (weight.sum(2) + np.exp(SINK))[:, :, None]
    assert np.allclose(attend(q, values, chosen, SINK, FP32), expected, atol=1e-5)


def test_a_row_without_slots_gives_zeros() -> None:
    q, values, chosen = case(70)
    assert not attend(q, values, chosen, SINK, OFFICIAL)[-1].any()


@pytest.mark.parametrize("slots", range(1, 40))
def test_unused_slots_behind_do_not_matter(slots: int) -> None:
    q, values, chosen = case(slots, slots)
    padded = np.concatenate([chosen, np.full((ROWS, 75 - slots), -1)], axis=1)
    for arithmetic in (OFFICIAL, FP32):
        alone, wide = (attend(q, values, s, SINK, arithmetic) for s in (chosen, padded))
        assert np.array_equal(alone, wide)


def test_other_rows_do_not_matter() -> None:
    q, values, chosen = case(130)
    together = attend(q, values, chosen, SINK, OFFICIAL)
    alone = [attend(q[r : r + 1], values, chosen[r : r + 1], SINK, OFFICIAL)[0] for r in range(ROWS)]
    assert np.array_equal(together, np.stack(alone))


def test_window_slots_are_the_last_positions_oldest_first() -> None:
    assert window_slots(np.array([0, 1, 5]), 0, 0, 3).tolist() == [[0, -1, -1], [0, 1, -1], [3, 4, 5]]
    assert window_slots(np.array([5]), 3, 0, 3).tolist() == [[0, 1, 2]]
    assert window_slots(np.array([5, 6]), 3, 5, 3).tolist() == [[2, -1, -1], [2, 3, -1]]


def test_selection_takes_the_lowest_of_equals_and_only_what_is_allowed() -> None:
    scores = np.array([[1, 3, 3, 3, 0], [5, 4, 3, 2, 1]], np.float32)
    allowed = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 0, 0]], bool)
    assert select(scores, allowed, 2).tolist() == [[1, 2], [2, -1]]


def test_candidates_pin_the_newest_block() -> None:
    scores = np.array([[9, 0, 8, 0, 1, -np.inf, -np.inf]], np.float32)
    mask = candidate_mask(scores, np.array([5]), blocks=2, block_size=2)
    assert mask.tolist() == [[True, True, False, False, True, True, False]]
    assert not candidate_mask(np.full((1, 4), -np.inf, np.float32), np.array([0]), 1, 2).any()

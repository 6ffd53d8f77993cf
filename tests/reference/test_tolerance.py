"""What the comparison's rules let pass."""

import numpy as np
import pytest

from dsuf.golden.choices import Choice, Scores, compare_candidates, compare_experts, compare_selection
from dsuf.golden.measure import Distance, count_equal
from dsuf.golden.tolerance import EXACT, FP32, Tolerance
from dsuf.reference.moe import Router


def rows(*errors: float) -> Distance:
    return Distance(np.array(errors), np.array(errors) == 0)


def test_errors_are_relative_to_the_recorded_row() -> None:
    own, recorded = (
        np.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0], [0.0, 1.0]]),
        np.array([[3.0, 5.0], [0, 2], [0, 0], [0, 0]]),
    )
    found = Distance.between(own, recorded)
    assert np.allclose(found.errors, [1 / 34**0.5, 0, 0, np.inf])
    assert found.equal.tolist() == [False, True, True, False]


@pytest.mark.parametrize("own", [np.array([[np.nan, 1.0]]), np.array([[np.inf, 1.0]]), np.array([[1.0]])])
def test_what_cannot_be_compared_is_infinitely_far(own: np.ndarray) -> None:
    found = Distance.between(own, np.array([[1.0, 1.0]]))
    assert found.errors.tolist() == [np.inf]
    assert not FP32.allows(found)


def test_equal_elements_of_other_shapes_do_not_count() -> None:
    assert count_equal(np.ones(3), np.ones((3, 1))) == (0, 3)
    assert count_equal(np.array([1, 2, 3]), np.array([1, 2, 4])) == (2, 3)


def test_strict_tolerances_allow_no_row_beyond() -> None:
    assert FP32.allows(rows(0, 9e-6))
    assert not FP32.allows(rows(*[0] * 999, 2e-5))
    assert EXACT.allows(rows(0, 0))
    assert not EXACT.allows(rows(0, 1e-9))


def test_a_share_may_be_beyond_but_none_over_the_ceiling() -> None:
    limit = Tolerance(1e-3, 0.9, 1e-2)
    assert limit.allows(rows(*[0] * 9, 5e-3))
    assert not limit.allows(rows(*[0] * 8, 5e-3, 5e-3))
    assert not limit.allows(rows(*[0] * 9, 2e-2))
    assert Tolerance(1e-3, 0.9, 1e-2, spare=1).allows(rows(0, 5e-3))


def scores_of(own: list[float], recorded: list[float]) -> Scores:
    return Scores(np.array([own], np.float32), np.array([recorded], np.float32))


def test_another_entry_is_excused_only_where_scores_moved_as_far_as_the_margin() -> None:
    own, recorded, margin = np.array([[0, 2]]), np.array([[0, 1]]), np.array([0.1], np.float32)
    near = scores_of([3, 0.96, 1.04], [3, 1.05, 0.95])
    far = scores_of([3, 1.02, 1.03], [3, 1.05, 0.95])
    assert compare_selection(own, recorded, 3, margin, near).excused.all()
    assert compare_selection(own, recorded, 3, np.array([0.3], np.float32), far).excused.tolist() == [False]
    assert compare_selection(own, recorded, 3, margin, None).excused.tolist() == [False]
    assert compare_selection(recorded[:, ::-1], recorded, 3, margin, None).agrees.all()


def test_a_tie_is_excused() -> None:
    choice = compare_selection(np.array([[0, 2]]), np.array([[0, 1]]), 3, np.zeros(1, np.float32), None)
    assert choice.agrees.tolist() == [False]
    assert choice.excused.tolist() == [True]


def test_another_block_is_excused_only_if_its_best_is_as_good() -> None:
    recorded = np.array([[True, True, False, False, True, True]])
    own = np.array([[True, True, True, True, False, False]])
    near, far = [5, 1, 2.0, 0, 2.1, 0], [5, 1, 1.0, 0, 2.1, 0]
    moved = [5, 1, 2.06, 0, 2.05, 0]
    assert compare_candidates(own, recorded, 2, scores_of(moved, near)).excused.tolist() == [True]
    assert compare_candidates(own, recorded, 2, scores_of(far, far)).excused.tolist() == [False]
    assert compare_candidates(own, recorded, 2, None).excused.tolist() == [False]


def test_experts_are_excused_at_small_margins_only() -> None:
    router = Router(np.eye(3), np.zeros(3, np.float32), chosen=1, route_scale=1)
    v = np.array([[1.0, 1.000001, 0], [1.0, 2.0, 0]], np.float32)
    choice = compare_experts(router, v, np.array([[0], [0]]), "fp32")
    assert choice.agrees.tolist() == [False, False]
    assert choice.excused.tolist() == [True, False]


def test_scores_that_are_impossible_elsewhere_are_infinitely_far() -> None:
    found = scores_of([1, -np.inf], [1, 2]).distance
    assert found.errors.tolist() == [np.inf]
    small = Scores(np.array([[2.0, 1], [1e-9, -np.inf]], np.float32), np.array([[2.0, 1], [2e-9, -np.inf]], np.float32))
    assert small.distance.largest < 1e-8


def test_choices_are_pooled() -> None:
    first = Choice(np.array([True, False]), np.array([False, True]))
    pooled = Choice.pooled([first, first])
    assert pooled.agrees.tolist() == [True, False, True, False]

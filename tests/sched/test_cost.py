"""The cost model: it finds what made the times up, whatever noise, pauses and order they come in."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.sched.cost import LEAP, LEAST_EXCESS, Cost, CostFit, Shape, solve

CPU = Cost(step_s=0.002, row_s=0.015, draft_s=0.001, token_s=0.0005, replay_s=0.0003)
TERMS = ("step_s", "row_s", "draft_s", "token_s", "replay_s")
shapes = st.builds(
    Shape, rows=st.integers(0, 64), drafts=st.integers(0, 5), tokens=st.integers(0, 8192), replayed=st.integers(0, 128)
)


def draw_shape(chance: random.Random) -> Shape:
    """A step as they come."""
    tokens = chance.choice([0, 0, 0, 100, 256])
    rows = chance.randint(0 if tokens else 1, 8)
    return Shape(
        rows=rows, drafts=chance.choice([0, 5]), tokens=tokens, replayed=chance.randint(50, 100) if tokens == 100 else 0
    )


def test_without_steps_nothing_costs_anything() -> None:
    assert CostFit().cost == Cost(known_tokens=0)
    assert Cost().predict_s(Shape(rows=5, drafts=3, tokens=100, replayed=9)) == 0


def test_the_terms_are_found() -> None:
    fit, chance = CostFit(), random.Random(1)
    for _ in range(200):
        shape = draw_shape(chance)
        fit.observe(shape, CPU.predict_s(shape))
    for name in TERMS:
        assert getattr(fit.cost, name) == pytest.approx(getattr(CPU, name), rel=0.03), name


def test_noise_and_pauses_move_it_little() -> None:
    fit, chance = CostFit(), random.Random(2)
    for step in range(400):
        shape = draw_shape(chance)
        pause = 50.0 if step % 40 == 17 else 1.0
        fit.observe(shape, CPU.predict_s(shape) * chance.uniform(0.85, 1.15) * pause)
    for shape in (Shape(rows=1), Shape(rows=8, drafts=5), Shape(rows=4, tokens=256)):
        assert fit.cost.predict_s(shape) == pytest.approx(CPU.predict_s(shape), rel=0.25)


def test_a_machine_that_slows_down_is_followed_within_a_few_steps() -> None:
    fit, chance = CostFit(), random.Random(3)
    probe = Shape(rows=3, tokens=256)
    for factor, steps, off in ((1.0, 400, 0.05), (4.0, 40, 0.25), (4.0, 400, 0.1), (1.0, 60, 0.25)):
        for _ in range(steps):
            shape = draw_shape(chance)
            fit.observe(shape, factor * CPU.predict_s(shape))
        assert fit.cost.predict_s(probe) == pytest.approx(factor * CPU.predict_s(probe), rel=off), (factor, steps)


def test_what_was_learnt_at_one_pace_holds_at_another() -> None:
    """Single rows were only seen on a slow machine, crowds only on a fast one."""
    fit = CostFit()
    for rows, factor in ((11, 3.0), (1, 3.0), (11, 3.0), (11, 1.0)):
        for _ in range(40):
            fit.observe(Shape(rows=rows), factor * CPU.predict_s(Shape(rows=rows)))
    for rows in (1, 6, 11):
        assert fit.cost.predict_s(Shape(rows=rows)) == pytest.approx(CPU.predict_s(Shape(rows=rows)), rel=0.2)


def test_the_excess_is_what_chunks_go_over_their_expectation_by() -> None:
    fit, chance = CostFit(), random.Random(5)
    for factors, expected in (((1.0, 1.0), LEAST_EXCESS), ((0.6, 1.6), 1.6)):
        for step in range(200):
            pause = 40 if step in (150, 160) else 1
            shape = Shape(rows=2, tokens=256)
            fit.observe(shape, CPU.predict_s(shape) * chance.uniform(*factors) * pause)
        assert fit.cost.excess == pytest.approx(expected, rel=0.15), factors


def test_no_leap_is_longer_than_what_was_measured_allows() -> None:
    fit = CostFit()
    for tokens, known in ((19, 19 * LEAP), (5, 19 * LEAP), (100, 100 * LEAP)):
        fit.observe(Shape(tokens=tokens), 0.01)
        assert fit.cost.known_tokens == known


def test_steps_of_one_kind_are_followed_within_a_dozen() -> None:
    fit = CostFit()
    for factor in (1.0, 5.0, 0.5):
        for _ in range(40):
            fit.observe(Shape(rows=2, tokens=256), factor * CPU.predict_s(Shape(rows=2, tokens=256)))
        expected = factor * CPU.predict_s(Shape(rows=2, tokens=256))
        assert fit.cost.predict_s(Shape(rows=2, tokens=256)) == pytest.approx(expected, rel=0.1)


def test_rows_are_told_from_steps_as_soon_as_their_number_changes() -> None:
    fit = CostFit()
    for rows in (1, 11):
        for _ in range(30):
            fit.observe(Shape(rows=rows), CPU.predict_s(Shape(rows=rows)))
    for _ in range(2000):
        fit.observe(Shape(rows=11), CPU.predict_s(Shape(rows=11)))
    assert fit.cost.row_s == pytest.approx(CPU.row_s, rel=0.05)
    assert fit.cost.predict_s(Shape(rows=1)) == pytest.approx(CPU.predict_s(Shape(rows=1)), rel=0.05)


def test_an_hour_of_decoding_does_not_wipe_out_what_prefill_costs() -> None:
    fit, chance = CostFit(), random.Random(4)
    for _ in range(100):
        shape = draw_shape(chance)
        fit.observe(shape, CPU.predict_s(shape))
    for _ in range(5000):
        fit.observe(Shape(rows=1), CPU.predict_s(Shape(rows=1)))
    assert fit.cost.token_s == pytest.approx(CPU.token_s, rel=0.05)


def test_what_steps_do_not_tell_apart_shares_alike() -> None:
    fit = CostFit()
    for _ in range(20):
        fit.observe(Shape(rows=1), 0.01)
    assert fit.cost.step_s == pytest.approx(0.005, rel=0.01) and fit.cost.row_s == pytest.approx(0.005, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.floats(1e-6, 1e3)), max_size=30))
def test_no_term_is_ever_negative_or_infinite(steps: list[tuple[Shape, float]]) -> None:
    fit = CostFit()
    for shape, seconds in steps:
        fit.observe(shape, seconds)
        for name in TERMS:
            assert 0 <= getattr(fit.cost, name) < float("inf")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=6, max_size=6), st.lists(st.floats(-5, 5), min_size=6, max_size=6))
def test_the_solution_is_not_worse_than_nothing_at_all(a: list[float], b: list[float]) -> None:
    rows = np.array(a).reshape(3, 2)
    squares, products = rows.T @ rows, rows.T @ np.array(b[:3])
    x = solve(squares, products)
    assert (x >= 0).all()
    assert x @ squares @ x - 2 * products @ x <= 1e-6

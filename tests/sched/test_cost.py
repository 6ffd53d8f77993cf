"""The cost model: it finds what made the times up, whatever noise, pauses and order they come in."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.sched.cost import Cost, CostFit, Shape, solve

CPU = Cost(step_s=0.002, row_s=0.015, draft_s=0.001, token_s=0.0005, ending_s=0.03)
shapes = st.builds(
    Shape, rows=st.integers(0, 64), drafts=st.integers(0, 5), tokens=st.integers(0, 8192), endings=st.integers(0, 1)
)


def draw_shape(chance: random.Random) -> Shape:
    """A step as they come."""
    tokens = chance.choice([0, 0, 0, 100, 256])
    rows = chance.randint(0 if tokens else 1, 8)
    return Shape(rows=rows, drafts=chance.choice([0, 5]), tokens=tokens, endings=int(tokens == 100))


def test_without_steps_nothing_costs_anything() -> None:
    assert CostFit().cost == Cost()
    assert Cost().predict_s(Shape(rows=5, drafts=3, tokens=100, endings=1)) == 0


def test_the_terms_are_found() -> None:
    fit, chance = CostFit(), random.Random(1)
    for _ in range(200):
        shape = draw_shape(chance)
        fit.observe(shape, CPU.predict_s(shape))
    for name in Cost.__struct_fields__:
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
    for factor, steps, off in ((1.0, 300, 0.05), (5.0, 25, 0.25), (5.0, 400, 0.1), (1.0, 40, 0.25)):
        for _ in range(steps):
            shape = draw_shape(chance)
            fit.observe(shape, factor * CPU.predict_s(shape))
        assert fit.cost.predict_s(probe) == pytest.approx(factor * CPU.predict_s(probe), rel=off), (factor, steps)


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
        for name in Cost.__struct_fields__:
            assert 0 <= getattr(fit.cost, name) < float("inf")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=6, max_size=6), st.lists(st.floats(-5, 5), min_size=6, max_size=6))
def test_the_solution_is_not_worse_than_nothing_at_all(a: list[float], b: list[float]) -> None:
    rows = np.array(a).reshape(3, 2)
    squares, products = rows.T @ rows, rows.T @ np.array(b[:3])
    x = solve(squares, products)
    assert (x >= 0).all()
    assert x @ squares @ x - 2 * products @ x <= 1e-6

"""Greedy ties, nucleus, seeds, and that draws follow the distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsuf.reference.sampler import choose, distribution, uniform
from dsuf.types import Sampling


def sampling(temperature: float = 1.0, top_p: float = 1.0, seed: int = 3) -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, seed=seed, max_tokens=1)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert choose(np.array([1, 5, 5, 2], np.float32), sampling(temperature=0), 0) == 1


def test_nucleus_is_the_fewest_tokens_that_reach_top_p() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1])).astype(np.float32)
    assert np.allclose(distribution(logits, sampling(top_p=0.6)), [5 / 7, 2 / 7, 0, 0], atol=1e-6)
    assert np.allclose(distribution(logits, sampling(top_p=1e-9)), [1, 0, 0, 0])


def test_temperature_sharpens() -> None:
    logits = np.array([1, 2], np.float32)
    assert distribution(logits, sampling(temperature=0.1))[1] > distribution(logits, sampling())[1]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2])).astype(np.float32)
    draws = [choose(logits, sampling(seed=9), position) for position in range(4000)]
    shares = np.bincount(draws, minlength=4) / len(draws)
    assert np.abs(shares - [0.1, 0.4, 0.3, 0.2]).max() < 0.03


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
def test_a_seed_and_a_position_fix_the_draw(seed: int, position: int) -> None:
    assert uniform(seed, position, "token") == uniform(seed, position, "token")
    assert 0 <= uniform(seed, position, "token") < 1
    assert uniform(seed, position, "token") != uniform(seed, position, "draft")


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    top_p=st.floats(0.01, 1),
    temperature=st.floats(0.01, 2),
)
def test_a_draw_always_has_mass(logits: list[float], top_p: float, temperature: float) -> None:
    values, how = np.array(logits, np.float32), sampling(temperature, top_p)
    assert distribution(values, how)[choose(values, how, 5)] > 0


@pytest.mark.parametrize("seed", [2**63, 2**64 - 2])
def test_seeds_that_a_float_cannot_tell_apart(seed: int) -> None:
    assert uniform(seed, 7, "token") != uniform(seed + 1, 7, "token")
    assert uniform(seed, 7, "token") == uniform(seed - 2**64, 7, "token")


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_extreme_seeds_work(seed: int) -> None:
    assert choose(np.zeros(8, np.float32), sampling(seed=seed), 2**20) in range(8)

"""The number of threads reaches the library that uses them."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from dsuf.node.threads import count_threads, limit_threads


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The number of threads as it was."""
    assert np.ones(2).sum() == 2
    before = count_threads()
    yield
    limit_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_the_limit_is_what_the_library_says(count: int) -> None:
    limit_threads(count)
    assert count_threads() == count


def test_by_default_one_core_stays_free() -> None:
    limit_threads(0)
    assert count_threads() == max(1, len(os.sched_getaffinity(0)) - 1)

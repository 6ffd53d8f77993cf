"""Figures of waits at meetings, from waits that are known."""

import numpy as np

from bench.skew import Waits, describe_waits


def test_figures() -> None:
    """Each rank's own sum, followers' meetings in it; ahead is who waits longer where all meet."""
    first = Waits(np.array([1.0, 3.0, 1.0]), np.array([True, True, True]))
    second = Waits(np.array([1.5, 20.0, 1.0, 4.0]), np.array([True, False, True, True]))
    found = describe_waits([[first, second]] * 5, [1.0] * 5)
    assert found["meetings"] == 3 and found["waited_us"] == [5.0, 26.5]
    assert found["share_waited"] == [0.005, 0.0265]
    assert (found["skew_median_us"], found["skew_max_us"]) == (2.0, 3.0)

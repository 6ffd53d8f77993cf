"""When a run counts as steady."""

import pytest

from bench.ceiling import describe


@pytest.mark.parametrize("samples", [[4.4e6] * 5, [4.4e6, 4.45e6, 4.35e6], [4.4e6] * 30 + [3.9e6]])
def test_steady(samples: list[float]) -> None:
    """Within three parts in a hundred of the median; a lone sample of many may lie outside."""
    assert describe(samples).startswith("reads 4.40 TB/s") and "NOT STEADY" not in describe(samples)


@pytest.mark.parametrize("samples", [[4.4e6, 4.4e6, 3.9e6], [4.4e6] * 20 + [4.0e6] * 4, [4.0e6, 4.4e6]])
def test_not_steady(samples: list[float]) -> None:
    """One of few, or some of many, further off."""
    assert describe(samples).endswith("NOT STEADY")

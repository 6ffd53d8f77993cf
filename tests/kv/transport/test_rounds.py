"""Pitfall 15: whatever comes late, twice, damaged or never, and whoever leaves: no foreign rows, and all comes back."""

from collections import Counter

import pytest

from tests.kv.transport.rounds import play_virtually

ROUNDS = 100


@pytest.mark.parametrize("seed", range(4))
def test_some_rounds(seed: int) -> None:
    ends = play_virtually(seed, 50)
    assert ends["peer"] > 0
    assert ends["left"] > 0


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_rounds(part: int) -> None:
    ends = Counter[str]()
    for seed in range(10):
        ends.update(play_virtually(1000 + 10 * part + seed, ROUNDS))
    assert min(ends[name] for name in ("peer", "own", "left", "late", "twice", "never", "flip", "cut")) > 10, ends

"""The soak campaign: its rule on memory, and its short twin."""

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bench.campaigns.memory import GROWTH_LIMIT, Sample, find_slope, judge
from bench.campaigns.soak import list_held
from bench.campaigns.tally import Tally

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def grow(mib_at: dict[float, float], noise_mib: float = 0.0) -> list[Sample]:
    """Samples a second along straight lines from point to point."""
    chance, points = random.Random(1), sorted(mib_at.items())
    samples = []
    for (start_s, start), (stop_s, stop) in pairwise(points):
        for at_s in range(round(start_s), round(stop_s)):
            mib = start + (stop - start) * (at_s - start_s) / (stop_s - start_s)
            samples.append(Sample(at_s, round((mib + chance.uniform(-noise_mib, noise_mib)) * MIB)))
    return samples


def test_growth_while_warming_up_is_fine() -> None:
    verdict = judge(grow({0: 100, 30: 200, 90: 200}, noise_mib=2))
    assert verdict.flat and abs(verdict.growth_share) < 0.01


def test_a_leak_is_found() -> None:
    assert not judge(grow({0: 100, 30: 200, 90: 212}, noise_mib=2)).flat
    assert judge(grow({0: 100, 30: 200, 90: 204}, noise_mib=2)).growth_share == pytest.approx(0.02, abs=0.008)
    assert not judge(grow({0: 200, 90: 230})).flat  # a leak from the start


def test_a_peak_is_no_leak() -> None:
    samples = grow({0: 200, 90: 200})
    samples[-3:] = [Sample(sample.at_s, 260 * MIB) for sample in samples[-3:]]
    assert judge(samples).flat


def test_slope_of_a_line() -> None:
    assert find_slope(grow({0: 100, 40: 140})) == pytest.approx(MIB, rel=0.001)
    assert GROWTH_LIMIT < 0.1


def test_what_is_held_is_named() -> None:
    node = {"turns": {"queued": 0, "writing": 1}, "engine": {"turns": 0}, "session_cache": {"bytes": 9, "leases": 2}}
    assert list_held(node) == ["turns.writing = 1", "session_cache.bytes = 9", "session_cache.leases = 2"]
    assert list_held(node, ["bytes"]) == ["turns.writing = 1", "session_cache.leases = 2"]


def test_usage_must_add_up() -> None:
    tally = Tally()
    details = {"device_tokens": 1, "host_tokens": 2, "peer_tokens": 0, "computed_tokens": 3}
    tally.check_usage("x", {"prompt_tokens": 6, "completion_tokens": 4, "prompt_tokens_details": details})
    assert (tally.fault_count, tally.prompt_tokens, tally.completion_tokens) == (0, 6, 4)
    tally.check_usage("x", {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": details})
    tally.check_usage("x", {})
    assert tally.fault_count == 2


@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_minutes() -> None:
    command = [sys.executable, "bench/campaigns/soak.py", "--minutes", "2", "--discard"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, run.stdout + run.stderr

"""Whether a process's memory stays flat, by a rule that is stated here."""

import statistics
from collections.abc import Sequence
from itertools import combinations

import msgspec

WARM_UP_SHARE = 1 / 3
"""The first part of a run, in which caches, pages and pools fill up, is not judged."""
GROWTH_LIMIT = 0.04
"""The rest may grow by so much, of the memory at the end of the warm-up, along its trend."""


class Sample(msgspec.Struct, frozen=True):
    """Memory in use `at_s` seconds after the start."""

    at_s: float
    resident_bytes: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Memory at the start, the end of the warm-up and the end; the trend behind it, and what that adds in that time."""

    start_bytes: int
    warm_bytes: int
    end_bytes: int
    slope_bytes_per_s: float
    growth_share: float

    @property
    def flat(self) -> bool:
        """Whether the rule holds."""
        return self.growth_share <= GROWTH_LIMIT


def judge(samples: Sequence[Sample]) -> Verdict:
    """The verdict on at least six samples, in order of time."""
    first = round(len(samples) * WARM_UP_SHARE)
    rest = samples[first:]
    slope = find_slope(rest)
    warm = samples[first].resident_bytes
    return Verdict(
        start_bytes=samples[0].resident_bytes, warm_bytes=warm, end_bytes=samples[-1].resident_bytes,
        slope_bytes_per_s=slope, growth_share=slope * (rest[-1].at_s - rest[0].at_s) / warm,
    )  # fmt: skip


def find_slope(samples: Sequence[Sample]) -> float:
    """Bytes a second: the median slope over all pairs (Theil and Sen), which single peaks do not move."""
    return statistics.median(
        (later.resident_bytes - earlier.resident_bytes) / (later.at_s - earlier.at_s)
        for earlier, later in combinations(samples, 2)
    )

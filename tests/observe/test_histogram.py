"""The histogram of our own against the library's."""

import math
import random

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from dsuf.observe.histogram import Histogram

BOUNDS = (0.001, 0.01, 0.25, 1, 10)


def test_text_is_the_librarys() -> None:
    """Same name, bounds and values, on bounds and between, one by one or several at once: the same text."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    prometheus_client.disable_created_metrics()
    mine = Histogram("gap_seconds", "Gaps", BOUNDS, ours)
    library = prometheus_client.Histogram("gap_seconds", "Gaps", buckets=BOUNDS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    chance = random.Random(3)
    for value in [0.0, *BOUNDS, 11.0, math.inf] + [2.0 ** chance.randint(-12, 5) for _ in range(200)]:
        count = chance.choice((1, 2, 4))
        mine.observe(value, count)
        for _ in range(count):
            library.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_several_at_once_are_several() -> None:
    """One call for six values counts six."""
    registry = CollectorRegistry()
    Histogram("x", "x", BOUNDS, registry).observe(0.5, 6)
    assert registry.get_sample_value("x_count") == 6.0
    assert registry.get_sample_value("x_sum") == 3.0
    assert registry.get_sample_value("x_bucket", {"le": "0.25"}) == 0.0
    assert registry.get_sample_value("x_bucket", {"le": "1.0"}) == 6.0

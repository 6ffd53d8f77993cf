"""The campaign of equalities, on the toy machine: what differs is counted, and judged where it must not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.campaigns.equalities import WAYS, Said, compare, compare_ways, hold, say
from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from tests.cuda.host import HostDriver, make_host_machine
from tests.cuda.test_protocol import say as tell

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
PROMPTS = [np.arange(2, 2 + length) for length in (9, 60, 130)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEngine]:
    """Its thread ends before its driver goes: what is queued then would reach a real one."""
    setup = Setup(context_tokens=700, max_turns=3, pages=20, prefill_rows=64)
    engine = CudaEngine(make_host_machine(monkeypatch, CONFIG, setup), "weights", "exact", captures=False)
    yield engine
    asyncio.run(engine.close())
    driver: HostDriver = engine.machine.device.driver
    assert not driver.alive and not driver.memory


def test_all_ways_say_the_same(engine: CudaEngine) -> None:
    """The toy's own replies, and a row a way."""
    first = say(engine, PROMPTS, 12, WAYS[0])
    assert first.replies[:3] == [tell(prompt.tolist(), 12) for prompt in PROMPTS]
    assert first.replies[3] == first.replies[0] and any(first.cache)
    rows = list(compare_ways(engine, PROMPTS, 12, first))
    assert len(rows) == len(WAYS) and hold(rows)
    assert all(row["tokens"] == sum(map(len, first.replies)) for row in rows[:-1])


def test_differences_count(engine: CudaEngine) -> None:
    """From where a reply parts to its end; a shorter one, another cache."""
    base = Said([[1, 2, 3, 4], [5, 6]], b"ab")
    row = compare("way", Said([[1, 2, 9, 4], [5, 6]], b"ab"), base)
    assert (row["parted"], row["different"], row["same_cache"]) == (1, 2, True)
    assert compare("way", Said([[1, 2, 3], [5, 6]], b"ab"), base)["different"] == 1
    assert compare("way", Said([[1, 2, 3, 4, 5], [6]], b"ac"), base)["different"] == 1 + 2
    assert hold([compare("way", base, base), {**row, "way": "2 ranks"}])
    assert not hold([row]) and not hold([compare("way", base._replace(cache=b""), base)])
    assert not hold([{**row, "way": "2 ranks, drafts"}])

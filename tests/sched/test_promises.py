"""What the scheduler promises, kept on the reference engine: bounded gaps beside long prompts, fair shares.

Times are seconds of this process's own work, so that what else the machine does matters little.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.config import Settings
from dsuf.node.engines import find_cache
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model
from dsuf.sched.scheduler import Scheduler
from dsuf.types import Ticket, Turn
from tests.reference.conftest import model, small_checkpoint
from tests.sched.rig import serving, until
from tests.toy import make_turn

__all__ = ["model", "small_checkpoint"]


@pytest.fixture(scope="module")
def embedded() -> Path:
    """The model that is served without any other."""
    return ensure_embedded(find_cache(Settings()))


@asynccontextmanager
async def computing(source: Model, *, max_turns: int, gap_s: float = 0.5) -> AsyncIterator[Scheduler]:
    """A scheduler over a reference engine of its own."""
    engine = ReferenceEngine(
        source, "reference", "weights", context_tokens=min(10_000, source.config.max_seq_len), max_turns=max_turns,
        prefill="replay",
    )  # fmt: skip
    async with serving(engine, chunk_tokens=256, gap_s=gap_s, blocks=64) as scheduler:
        yield scheduler
    await engine.close()


def draw(source: Model, name: str, count: int, **options: object) -> Turn:
    """A turn over random ids that practically never ends by itself before its length."""
    seed = abs(hash(name)) % 1000
    ids = np.random.default_rng(seed).integers(3, source.config.vocab_size - 8, count)
    return make_turn(name, ids.tolist(), **({"max_tokens": 1000, "temperature": 1.0, "seed": seed} | options))  # type: ignore[arg-type]


class Listener:
    """Reads a ticket and notes when tokens came, on the wall clock and in process time."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket, self.times_s, self.busy_s = ticket, list[float](), list[float]()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for result in self.ticket:
            if result.ids:
                self.times_s.append(time.monotonic())
                self.busy_s.append(time.process_time())

    async def rate(self, tokens: int, *, within_s: float = 60.0) -> float:
        """Tokens a second over the next so many."""
        first = len(self.busy_s)
        await until(lambda: len(self.busy_s) > first + tokens, within_s)
        return (len(self.busy_s) - first - 1) / (self.busy_s[-1] - self.busy_s[first])


async def check_gaps(
    source: Model, *, prompts: int, length: int, gap_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """One stream decodes while `prompts` of `length` tokens are computed."""
    async with computing(source, max_turns=prompts + 1, gap_s=gap_s) as scheduler:
        stream = Listener(scheduler.submit(draw(source, "stream", 20, max_tokens=3000)))
        await until(lambda: len(stream.times_s) > 20, 30)
        begun_s, tokens = time.monotonic(), len(stream.times_s)
        long = [Listener(scheduler.submit(draw(source, f"long{i}", length, max_tokens=1))) for i in range(prompts)]
        await asyncio.gather(*(listener.task for listener in long))
        took_s, got = time.monotonic() - begun_s, len(stream.times_s) - tokens
        gaps_s, wall_s = np.diff(stream.busy_s), np.diff(stream.times_s)
        with capsys.disabled():
            print(
                f"\n{prompts} prompts of {length} in {took_s:.1f} s beside {got / took_s:.1f} tokens/s; gap: ", end=""
            )
            print(f"median {np.median(gaps_s):.3f} s, largest {gaps_s.max():.3f} s, ", end="")
            print(f"on the wall clock {wall_s.max():.3f} s, bound {gap_s:g} s")
        stream.ticket.cancel()
    assert all(listener.times_s for listener in long), "every prompt came to its end"
    assert gaps_s.max() <= gap_s and wall_s.max() <= 3 * gap_s
    assert got >= took_s / gap_s


@pytest.mark.full
async def test_pitfall_17_a_stream_beside_four_prompts_of_8000_tokens(
    embedded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await check_gaps(load_model(embedded), prompts=4, length=8000, gap_s=0.5, capsys=capsys)


async def test_a_stream_beside_four_prompts(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """The same where a full run is too long: a smaller model, shorter prompts."""
    await check_gaps(model, prompts=4, length=900, gap_s=1.0, capsys=capsys)


async def check_shares(source: Model, *, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenant of one stream beside one of ten."""
    async with computing(source, max_turns=12) as scheduler:
        small = Listener(scheduler.submit(draw(source, "small", 20, tenant="a")))
        await small.rate(10)
        alone = await small.rate(tokens)
        large = [Listener(scheduler.submit(draw(source, f"large{i}", 20, tenant="b"))) for i in range(10)]
        await until(lambda: all(listener.times_s for listener in large), 30)
        await small.rate(tokens // 2)
        rate = await small.rate(tokens)
        crowd = [len(listener.times_s) for listener in large]
        for listener in (small, *large):
            listener.ticket.cancel()
    with capsys.disabled():
        print(f"\nalone {alone:.1f} tokens/s, beside ten of another tenant {rate:.1f}, which is {rate / alone:.0%}")
    assert rate >= 0.4 * alone
    assert min(crowd) > 0


@pytest.mark.full
async def test_two_tenants_at_10_to_1(embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await check_shares(load_model(embedded), tokens=150, capsys=capsys)


async def test_two_tenants_at_10_to_1_on_a_small_model(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    await check_shares(model, tokens=60, capsys=capsys)

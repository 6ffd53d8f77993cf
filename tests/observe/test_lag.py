"""The lag sampler notices what holds the loop, and its figures are right."""

import asyncio
import time

from dsuf.observe.lag import LagSummary, LoopLag, summarise_lag


def test_percentiles_are_nearest_rank() -> None:
    assert summarise_lag([]) == LagSummary()
    assert summarise_lag([0.5]) == LagSummary(samples=1, p50_s=0.5, p99_s=0.5, max_s=0.5)
    hundred = [i / 100 for i in range(101)]
    assert summarise_lag(hundred[::-1]) == LagSummary(samples=101, p50_s=0.5, p99_s=0.99, max_s=1.0)


async def test_a_held_loop_shows() -> None:
    seen: list[float] = []
    lag = LoopLag(seen.append, period_s=0.01)
    sampling = asyncio.create_task(lag.run())
    await asyncio.sleep(0.05)
    time.sleep(0.1)  # noqa: ASYNC251 - holding the loop is the point
    await asyncio.sleep(0.05)
    sampling.cancel()
    summary = lag.summarise()
    assert summary.samples == len(seen) >= 4
    assert 0.07 <= summary.max_s == max(seen)
    assert summary.p50_s < 0.05
    assert time.monotonic() - lag.last_tick_s < 1

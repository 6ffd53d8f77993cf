"""Calls that cannot be taken back are waited for, however often who waits is cancelled."""

import asyncio

import pytest

from dsuf.kv.calls import see_through


@pytest.mark.parametrize("cancels", [0, 1, 3])
async def test_a_call_is_seen_through(cancels: int) -> None:
    ended = asyncio.Event()

    async def call() -> int:
        await asyncio.sleep(0.02)
        ended.set()
        return 7

    task = asyncio.ensure_future(see_through(call()))
    for _ in range(cancels):
        await asyncio.sleep(0.001)
        task.cancel()
    await asyncio.wait({task})
    assert ended.is_set()
    assert task.cancelled() == (cancels > 0)
    assert cancels or task.result() == 7

"""Waiting for calls that cannot be taken back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def finish_within(call: Awaitable[T], seconds: float, then: Callable[[], None] = lambda: None) -> T:
    """What `call` gives; raises `TimeoutError` after `seconds`.

    The call goes on when nobody waits for it any more. `then` runs when it has ended, however late: what it reads or
    writes must not be used otherwise before.
    """
    task = asyncio.ensure_future(call)

    def end(done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # nobody may be left who asks for it
        then()

    task.add_done_callback(end)
    async with asyncio.timeout(seconds):
        return await asyncio.shield(task)

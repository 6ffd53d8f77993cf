"""Waiting for calls that cannot be taken back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dsuf.errors import EngineFailed

T = TypeVar("T")


def when_ended(call: asyncio.Future[Any] | None, then: Callable[[], None]) -> None:
    """Run `then` as soon as nothing of `call` goes on: at once, if it has ended."""
    if call is None or call.done():
        then()
    else:
        call.add_done_callback(lambda _: then())


async def finish_within(call: Awaitable[T], seconds: float, then: Callable[[], None] = lambda: None) -> T:
    """What `call` gives; raises `TimeoutError` after `seconds`, `EngineFailed` if somebody else broke it off.

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
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if task.cancelled() and own is not None and not own.cancelling():
                raise EngineFailed("a call was broken off") from None
            raise

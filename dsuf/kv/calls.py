"""Waiting for calls that cannot be taken back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from dsuf.errors import EngineFailed

T = TypeVar("T")
P = ParamSpec("P")

SMALL_BYTES = 16_384
"""What is no larger is worked on at once: handing it to a thread takes longer, and some more where all are busy."""


async def work(size_bytes: int, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `function` gives, which works on `size_bytes`: in a thread where that is much."""
    if size_bytes <= SMALL_BYTES:
        return function(*arguments, **options)
    return await asyncio.to_thread(function, *arguments, **options)


async def see_through(call: Awaitable[T]) -> T:
    """What `call` gives, which cannot be broken off: whoever is cancelled meanwhile ends when it has ended."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise


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

"""Memory that the C library holds back: what was freed goes back to the system.

The engine's temporaries are megabytes, and small things that last lie between them. glibc gives each thread a heap of
its own, raises by itself the size from which it asks the system for each piece, and holds on to what is free in between
and at the end of such heaps: after half an hour of mixed load as much as was in use. With one heap for all threads
`malloc_trim` reaches all of it. It takes milliseconds, and what is needed again is mapped again.
"""

import asyncio
import ctypes
from typing import Any

PERIOD_S = 30.0
_M_ARENA_MAX = -8  # as in malloc.h


def share_heap() -> bool:
    """Let threads that begin from now on use one heap; whether the C library can do that. Call it early."""
    mallopt = _find("mallopt")
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))


def give_back() -> None:
    """Give free memory back to the system, where the C library can do that."""
    if (trim := _find("malloc_trim")) is not None:
        trim(0)


async def give_back_regularly(period_s: float = PERIOD_S) -> None:
    """`give_back` in a thread, at once and again and again, until cancelled."""
    while True:
        await asyncio.to_thread(give_back)
        await asyncio.sleep(period_s)


def _find(name: str) -> Any:
    """A function of glibc; None where another C library runs."""
    return getattr(ctypes.CDLL(None), name, None)

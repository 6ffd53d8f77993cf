"""Streams and events of the device, and how a coroutine waits for one: sleep most of the expected time, then poll."""

import asyncio
import time
from collections.abc import Callable
from typing import Self

from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.errors import DeviceError

SLEPT_SHARE = 0.8
"""Of the time that something is expected to take, how much is slept before polling begins."""

POLL_S = 0.00005
FIRST_PATIENCE = 2.0
"""Beyond this many times the expected time polls become rare."""

RARE_POLL_S = 0.002


class Event:
    """A mark in a stream."""

    def __init__(self) -> None:
        self.handle = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    @property
    def done(self) -> bool:
        """Whether the device has come past it; raises `DeviceError` if work before it failed."""
        (status,) = driver.cuEventQuery(self.handle)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call((status,))
        return True

    def close(self) -> None:
        """Forget the mark."""
        call(driver.cuEventDestroy(self.handle))


class Stream:
    """A queue of work; a lower `priority` number goes first where the device must choose."""

    def __init__(self, priority: int = 0) -> None:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = int(call(driver.cuStreamCreateWithPriority(flags, priority)))

    def record(self, event: Event) -> None:
        """Put `event` behind all that is queued."""
        call(driver.cuEventRecord(event.handle, self.handle))

    def follow(self, event: Event) -> None:
        """Let what is queued from now on begin only behind `event`."""
        call(driver.cuStreamWaitEvent(self.handle, event.handle, 0))

    def synchronize(self) -> None:
        """Block until all that is queued is done; raises `DeviceError` if some of it failed."""
        call(driver.cuStreamSynchronize(self.handle))

    def check(self) -> None:
        """Raise `DeviceError` if something that was queued has failed."""
        (status,) = driver.cuStreamQuery(self.handle)
        if status != driver.CUresult.CUDA_ERROR_NOT_READY:
            call((status,))

    def close(self) -> None:
        """Wait and free."""
        self.synchronize()
        call(driver.cuStreamDestroy(self.handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Sides:
    """Streams beside a main one: what is queued there runs at the same time as what the main one does meanwhile.

    Works on handles, so that it can be captured: a graph then has the branches.
    """

    def __init__(self, count: int, priority: int = 0) -> None:
        self._streams = [Stream(priority) for _ in range(count)]
        self._forks, self._joins = [Event() for _ in range(count)], [Event() for _ in range(count)]

    def fork(self, main: int, number: int) -> int:
        """Side stream `number`, which goes on from where `main` is; it must have been joined before."""
        side = self._streams[number].handle
        call(driver.cuEventRecord(self._forks[number].handle, main))
        call(driver.cuStreamWaitEvent(side, self._forks[number].handle, 0))
        return side

    def join(self, main: int, number: int) -> None:
        """Let `main` go on only behind what side stream `number` has queued."""
        call(driver.cuEventRecord(self._joins[number].handle, self._streams[number].handle))
        call(driver.cuStreamWaitEvent(main, self._joins[number].handle, 0))

    def close(self) -> None:
        """Wait and free."""
        for stream in self._streams:
            stream.close()
        for event in (*self._forks, *self._joins):
            event.close()


async def wait_until(
    done: Callable[[], bool], expected_s: float, deadline_s: float, check: Callable[[], None] = lambda: None
) -> float:
    """Wait for `done()`; returns the seconds that it took, raises `DeviceError` after `deadline_s`.

    `check` is asked now and then, once it takes long, and raises if it can never be done.
    """
    begun = time.perf_counter()
    # Timers of the event loop count whole milliseconds: rounded up, they would sleep through the end of a short step.
    slept_s = int(expected_s * SLEPT_SHARE * 1e3) / 1e3
    if slept_s > 0 and not done():
        await asyncio.sleep(slept_s)
    while not done():
        waited = time.perf_counter() - begun
        if waited > deadline_s:
            raise DeviceError(f"the device did not finish a step within {deadline_s:.0f} s")
        late = waited > FIRST_PATIENCE * max(expected_s, 0.001)
        if late:
            check()
        await asyncio.sleep(RARE_POLL_S if late else POLL_S)
    return time.perf_counter() - begun

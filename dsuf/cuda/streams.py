"""Streams and events of the device, and how a coroutine waits for one: sleep most of the expected time, then poll.

Where ranks have GPUs of their own, a stream is one on each of them, an event a mark in each, and what is said of them
is said to all: a rank is behind another only where they meet.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.errors import DeviceError

SLEPT_SHARE = 0.8
"""Of the time that something is expected to take, how much is slept before polling begins."""

POLL_S = 0.00005
FIRST_PATIENCE = 2.0
"""Beyond this many times the expected time polls become rare."""

RARE_POLL_S = 0.002


class Usable(Protocol):
    """A GPU that can be made current."""

    def use(self) -> None:
        """Make it the device of the calling thread."""


class Handle(int):
    """A stream's handle; where several ranks each have a stream, this is the first rank's."""

    others: tuple[int, ...] = ()
    stands_for: int = 0
    """The stream whose work is captured on this one, if it is there for that."""

    @classmethod
    def of(cls, handles: Sequence[int]) -> Self:
        """The first of `handles`, which knows the others."""
        handle = cls(handles[0])
        handle.others = tuple(handles[1:])
        return handle

    @property
    def all(self) -> tuple[int, ...]:
        """Those of all GPUs."""
        return (int(self), *self.others)


def handle_on(stream: int, rank: int) -> int:
    """The stream of `rank`; the same for all ranks where they share a GPU."""
    others = stream.others if isinstance(stream, Handle) else ()
    return others[rank - 1] if rank and others else stream


def worker_of(stream: int) -> int:
    """The stream on which what is queued here will run: another one if this is where its work is captured."""
    return (isinstance(stream, Handle) and stream.stands_for) or stream


def all_handles(stream: int) -> tuple[int, ...]:
    """The streams of all GPUs."""
    return stream.all if isinstance(stream, Handle) else (stream,)


def make_each(devices: Sequence[Usable], make: Callable[[], Any]) -> list[Any]:
    """What `make` makes on each of `devices`, or on the current one if there are none; the first is current then."""
    if not devices:
        return [make()]
    made = []
    try:
        for device in devices:
            device.use()
            made.append(make())
    finally:
        devices[0].use()
    return made


class Event:
    """A mark in a stream of `devices`, of the current one if none is named."""

    def __init__(self, devices: Sequence[Usable] = ()) -> None:
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handles = make_each(devices, lambda: call(driver.cuEventCreate(flags)))

    @property
    def done(self) -> bool:
        """Whether every device has come past it; raises `DeviceError` if work before it failed."""
        for handle in self.handles:
            (status,) = driver.cuEventQuery(handle)
            if status == driver.CUresult.CUDA_ERROR_NOT_READY:
                return False
            call((status,))
        return True

    def synchronize(self) -> None:
        """Block until it is done."""
        for handle in self.handles:
            call(driver.cuEventSynchronize(handle))

    def record(self, stream: int) -> None:
        """Put it behind all that is queued on the stream with this handle."""
        for handle, each in zip(self.handles, all_handles(stream), strict=True):
            call(driver.cuEventRecord(handle, each))

    def hold(self, stream: int) -> None:
        """Let what is queued on the stream with this handle from now on begin only behind it."""
        for handle, each in zip(self.handles, all_handles(stream), strict=True):
            call(driver.cuStreamWaitEvent(each, handle, 0))

    def close(self) -> None:
        """Forget the mark."""
        for handle in self.handles:
            call(driver.cuEventDestroy(handle))


class Stream:
    """A queue of work on `devices`, on the current one if none is named; a lower `priority` number goes first where
    the device must choose."""

    def __init__(self, priority: int = 0, devices: Sequence[Usable] = ()) -> None:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = make_each(devices, lambda: int(call(driver.cuStreamCreateWithPriority(flags, priority))))
        self.devices, self.handle = devices, Handle.of(made)

    def record(self, event: Event) -> None:
        """Put `event` behind all that is queued."""
        event.record(self.handle)

    def follow(self, event: Event) -> None:
        """Let what is queued from now on begin only behind `event`."""
        event.hold(self.handle)

    def synchronize(self) -> None:
        """Block until all that is queued is done; raises `DeviceError` if some of it failed."""
        for handle in self.handle.all:
            call(driver.cuStreamSynchronize(handle))

    def check(self) -> None:
        """Raise `DeviceError` if something that was queued has failed."""
        for handle in self.handle.all:
            (status,) = driver.cuStreamQuery(handle)
            if status != driver.CUresult.CUDA_ERROR_NOT_READY:
                call((status,))

    def close(self) -> None:
        """Wait and free."""
        self.synchronize()
        for handle in self.handle.all:
            call(driver.cuStreamDestroy(handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Sides:
    """Streams beside a main one: what is queued there runs at the same time as what the main one does meanwhile.

    Works on handles, so that it can be captured: a graph then has the branches.
    """

    def __init__(self, count: int, priority: int = 0, devices: Sequence[Usable] = ()) -> None:
        self._streams = [Stream(priority, devices) for _ in range(count)]
        self._forks, self._joins = ([Event(devices) for _ in range(count)] for _ in range(2))

    def fork(self, main: int, number: int) -> int:
        """Side stream `number`, which goes on from where `main` is; it must have been joined before."""
        side = self._streams[number].handle
        self._forks[number].record(main)
        self._forks[number].hold(side)
        return side

    def join(self, main: int, number: int) -> None:
        """Let `main` go on only behind what side stream `number` has queued."""
        self._joins[number].record(self._streams[number].handle)
        self._joins[number].hold(main)

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

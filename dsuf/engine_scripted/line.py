"""Calls that wait in line: each begins where the one before it ended, whether or not anybody waits for them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Handle(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """Let it not come."""


CallLater = Callable[[float, Callable[[], None]], Handle]
"""Calls a function after so many seconds."""
Takes = Callable[[], float | Awaitable[float]]
"""How many seconds a call takes, asked when it begins; where that itself takes time, to be waited for."""


_Call = tuple[asyncio.Future[Any], Callable[[], Any], Takes | None, object]
"""Its result, what is to be done, how long that takes, what it is about."""


class Line:
    """Makes calls one after the other. Where a call only takes its time, that is one timer and no task.

    `call_later` lets time pass; None: the loop's own.
    """

    def __init__(self) -> None:
        self.call_later: CallLater | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: deque[_Call] = deque()
        self._timer: Handle | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> list[object]:
        """What the calls in the line are about."""
        return [about for *_, about in self._calls]

    def add(self, work: Callable[[], _T], takes: Takes | None = None, about: object = None) -> asyncio.Future[_T]:
        """Put a call behind the others: `work` at the end of the time that it takes, if any. Its result is for later;
        who gives it up gives up the result alone."""
        self._loop = self._loop or asyncio.get_running_loop()
        result: asyncio.Future[_T] = self._loop.create_future()
        self._calls.append((result, work, takes, about))
        if len(self._calls) == 1:
            self._begin()
        return result

    async def close(self) -> None:
        """Break off the call that runs, which may hang, and those behind it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        while self._calls:
            self._calls.popleft()[0].cancel()

    def _begin(self) -> None:
        """Make calls up to the first that takes time, and begin that one."""
        while self._calls:
            takes = self._calls[0][2]
            try:
                seconds = None if takes is None else takes()
            except Exception as error:
                self._settle(error)
                continue
            if seconds is None:
                self._settle()
                continue
            if isinstance(seconds, float):
                self._wait(seconds)
            else:
                self._asking = asyncio.ensure_future(self._ask(seconds))
            break

    async def _ask(self, asked: Awaitable[float]) -> None:
        """Wait for how long the first call takes."""
        try:
            self._wait(await asked)
        except Exception as error:
            self._settle(error)
            self._begin()

    def _wait(self, seconds: float) -> None:
        """Let the first call take its time."""
        assert self._loop is not None
        self._timer = (self.call_later or self._loop.call_later)(seconds, self._end)

    def _end(self) -> None:
        """The first call has had its time."""
        self._settle()
        self._begin()

    def _settle(self, error: Exception | None = None) -> None:
        """Make the first call, unless it failed already, and give what comes of it to who still waits."""
        result, work = self._calls[0][:2]
        try:
            if error is not None:
                raise error
            given = work()
        except Exception as failure:
            if not result.done():
                result.set_exception(failure)
        else:
            if not result.done():
                result.set_result(given)
        self._calls.popleft()

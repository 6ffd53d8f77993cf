"""An event loop on virtual time: waiting costs nothing, threads are turns of the loop, and a seed makes a run repeat.

Whatever would run in a thread runs on the loop, after a delay that the caller draws: that is where threads differ from
run to run. The one worker of an engine keeps the order of its calls.
"""

import asyncio
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

TURNS = 100_000
"""A run that takes so many turns of the loop goes round in circles."""


class Stuck(Exception):
    """Nothing will ever happen any more, or the same for ever."""


class _Waiting(selectors.SelectSelector):
    """Lets virtual time pass instead of waiting."""

    def __init__(self, passes: Callable[[float | None], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[Any]:
        self._passes(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`delay_s` is asked for each call that would run in a thread. `complaints` is what tasks ended with unheard."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self.now_s = 1000.0
        self.turns = 0
        self.complaints: list[str] = []
        self._delay_s = delay_s
        self._lines: dict[Any, deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]] = {}
        super().__init__(_Waiting(self._pass))
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        line = self._lines.setdefault(executor, deque()) if executor is not None else deque()
        line.append((done, func, args))
        if len(line) == 1:
            self._begin(line)
        return done

    def _begin(self, line: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]) -> None:
        """The first call of a line begins; one that says so takes its own `seconds`."""
        seconds = getattr(line[0][1], "seconds", 0.0)
        self.call_later(seconds or self._delay_s(), self._work, line)

    def _work(self, line: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]) -> None:
        """Run the first call of a line; nobody needs to wait for it any more."""
        done, function, arguments = line.popleft()
        try:
            result = function(*arguments)
        except Exception as error:
            if not done.cancelled():
                done.set_exception(error)
        else:
            if not done.cancelled():
                done.set_result(result)
        if line:
            self._begin(line)

    def _pass(self, seconds: float | None) -> None:
        self.turns += 1
        if seconds is None:
            raise Stuck("everything waits, and for nothing")
        if self.turns > TURNS:
            raise Stuck(f"no end after {TURNS} turns of the loop, {self.now_s - 1000:.1f} s")
        self.now_s += max(0.0, seconds)

    def _complain(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Within, our modules, and tests of the scheduler, read the clock of `loop`."""
    clock = SimpleNamespace(monotonic=loop.time, time=time.time, perf_counter=time.perf_counter)
    ours = [module for name, module in sys.modules.items() if name.startswith(("dsuf.", "tests.sched."))]
    modules = [module for module in ours if getattr(module, "time", None) is time]
    patches = [patch.object(module, "time", clock) for module in modules]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def run_virtually(main: Callable[[], Any], delay_s: Callable[[], float] = lambda: 0.0, limit_s: float = 600.0) -> Any:
    """What the coroutine function `main` gives, run on a loop of its own; `limit_s` is virtual.

    Raises `AssertionError` where a task ended with an error that nobody heard of.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(delay_s)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        with virtual_time(loop):
            result = runner.run(_bounded(main, limit_s))
    assert not loop.complaints, loop.complaints
    return result


async def _bounded(main: Callable[[], Any], limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await main()
    except TimeoutError:
        raise Stuck(f"no end within {limit_s:g} s") from None

"""The end of a node: signals, the grace time of running turns, and what happens to those that outlast it."""

import asyncio
import signal
from collections.abc import Callable

from dsuf.errors import Unavailable
from dsuf.node.pulse import Pulse
from dsuf.observe.log import log_event
from dsuf.sched.scheduler import Scheduler

RETRY_S = 2
_EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


class Signals:
    """SIGTERM and SIGINT as events: `stop` is set by the first, `hurry` by the second. SIGHUP calls `on_hangup`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.exit_code = 0
        self.on_hangup: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Listen to the signals. Runs on the event loop, in the main thread."""
        loop = asyncio.get_running_loop()
        for number in _EXIT_CODES:
            loop.add_signal_handler(number, self.receive, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.on_hangup())

    def receive(self, number: signal.Signals) -> None:
        """A signal came."""
        if self.stop.is_set():
            self.hurry.set()
            return
        self.exit_code = _EXIT_CODES[number]
        self.stop.set()


async def drain(scheduler: Scheduler, pulse: Pulse, hurry: asyncio.Event, drain_s: float) -> bool:
    """Take no new turns, and wait until those that are here were read to their end; whether all were.

    After `drain_s`, or as soon as `hurry` is set, the rest ends with `Unavailable`, which `api/` tells in the stream.
    """
    pulse.begin_drain()
    sorry = Unavailable("the server is shutting down; please retry", retry_after_s=RETRY_S)
    scheduler.refuse(sorry)
    _log_turns("draining", scheduler)
    idle = asyncio.create_task(scheduler.wait_idle(drain_s))
    hurrying = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({idle, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        whole = idle.done() and idle.result()
    finally:
        idle.cancel()
        hurrying.cancel()
    if not whole:
        _log_turns("turns cut", scheduler)
        scheduler.end_all(sorry)
    return whole


def _log_turns(event: str, scheduler: Scheduler) -> None:
    """Log how many turns are where."""
    counts = scheduler.counters()
    log_event(event, queued=counts["queued"], attached=counts["attached"], writing=counts["writing"])

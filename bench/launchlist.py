"""The launches of a step as a list: counted, changed, captured again in part, and timed.

A list is taken down by standing in for `Kernels`; nothing runs meanwhile.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cupy

from dsuf.cuda.arena import Array
from dsuf.cuda.kernels import Kernels

WARM_UP, PROFILED = 20, 10

ENOUGH, BUDGET_US = 40, 600_000
"""Runs after which a measurement ends once it has taken that long."""


class Launch(NamedTuple):
    """An entry and the fields of its struct."""

    entry: str
    values: Mapping[str, Any]


class Recorder:
    """Takes launches down instead of queueing them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, entry: str, stream: int = 0, **values: Any) -> None:
        """As `Kernels.launch`."""
        self.launches.append(Launch(entry, values))


def capture(queue: Callable[[int], None], stream: Any) -> Any:
    """One graph of what `queue` queues on the stream whose handle it is given."""
    stream.begin_capture()
    try:
        queue(stream.ptr)
    finally:
        graph = stream.end_capture()
    return graph


def capture_all(kernels: Kernels, launches: Iterable[Launch], stream: Any) -> Any:
    """One graph of all `launches`, in their order."""

    def queue(handle: int) -> None:
        for launch in launches:
            kernels.launch(launch.entry, handle, **launch.values)

    return capture(queue, stream)


def time_us(graph: Any, stream: Any, replays: int, before: Callable[[], None] = lambda: None) -> list[float]:
    """Microseconds of each of up to `replays` runs of `graph`, sorted; `before` queues what puts things back, not
    timed."""
    times = []
    for number in range(WARM_UP + replays):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        before()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        if number >= WARM_UP:
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
        if len(times) >= ENOUGH and sum(times) > BUDGET_US:
            break
    return sorted(times)


def profile(
    kernels: Kernels, launches: Sequence[Launch], stream: Any, before: Callable[[], None]
) -> dict[str, tuple[int, float]]:
    """Of each entry, how often it is launched and how long all its launches take together, in microseconds.

    Each entry's launches run alone, one behind the other in a graph, over the same weights as in the step.
    """
    found = {}
    for entry in dict.fromkeys(launch.entry for launch in launches):
        own = [launch for launch in launches if launch.entry == entry]
        found[entry] = len(own), statistics.median(time_us(capture_all(kernels, own, stream), stream, PROFILED, before))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def arrays_of(launch: Launch) -> dict[str, Array]:
    """The arrays that a launch is given, by field."""
    return {name: value for name, value in launch.values.items() if isinstance(value, Array)}

"""Launches captured once a shape and replayed: a replay costs the host one call, whatever the pass is made of."""

from collections.abc import Callable, Hashable
from typing import Any

from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call

Queue = Callable[[int], None]
"""Queues some launches on the stream with this handle."""


class Graphs:
    """The captured graphs by shape; `captures=False` queues the launches themselves every time."""

    def __init__(self, *, captures: bool = True) -> None:
        self.captures = captures
        self._graphs: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, shape: Hashable, queue: Queue, stream: int) -> None:
        """Queue on `stream` what `queue` queues; what is captured for `shape` already is replayed."""
        if not self.captures:
            queue(stream)
            return
        self.prepare(shape, queue, stream)
        call(driver.cuGraphLaunch(self._graphs[shape], stream))

    def prepare(self, shape: Hashable, queue: Queue, stream: int) -> None:
        """Capture what `queue` queues for `shape`, unless it is there already; nothing runs."""
        if self.captures and shape not in self._graphs:
            self._graphs[shape] = _capture(queue, stream)

    def close(self) -> None:
        """Free all graphs; none is running."""
        graphs, self._graphs = self._graphs, {}
        for graph in graphs.values():
            call(driver.cuGraphExecDestroy(graph))


def _capture(queue: Queue, stream: int) -> Any:
    """The executable graph of what `queue` queues on `stream`; nothing of it runs."""
    call(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    try:
        queue(stream)
    except BaseException:
        driver.cuStreamEndCapture(stream)
        raise
    graph = call(driver.cuStreamEndCapture(stream))
    try:
        return call(driver.cuGraphInstantiate(graph, 0))
    finally:
        call(driver.cuGraphDestroy(graph))

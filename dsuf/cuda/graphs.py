"""Launches captured once a shape and replayed: a replay costs the host one call, whatever the pass is made of.

Where ranks have GPUs of their own, a shape is a graph on each of them. They are launched one after the other, and none
knows of the others: what they share is the memory in which ranks meet.

Launches are captured on streams that are for nothing else: whoever waits for earlier work asks its stream how that
goes, meanwhile and on another thread, and a stream that captures must not be asked.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.streams import Stream, Usable, all_handles

Queue = Callable[[int], None]
"""Queues some launches on the stream with this handle."""


class Graphs:
    """The captured graphs by shape; `captures=False` queues the launches themselves every time."""

    def __init__(self, *, captures: bool = True, devices: Sequence[Usable] = ()) -> None:
        self.captures, self._devices = captures, devices
        self._graphs: dict[Hashable, list[Any]] = {}
        self._capturing: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, shape: Hashable, queue: Queue, stream: int) -> None:
        """Queue on `stream` what `queue` queues; what is captured for `shape` already is replayed.

        `queue` is given a stream of the same priority if it is captured.
        """
        if not self.captures:
            queue(stream)
            return
        self.prepare(shape, queue, stream)
        for number, (graph, handle) in enumerate(zip(self._graphs[shape], all_handles(stream), strict=True)):
            self._use(number)
            call(driver.cuGraphLaunch(graph, handle))
        self._use(0)

    def prepare(self, shape: Hashable, queue: Queue, stream: int) -> None:
        """Capture what `queue` queues for `shape`, unless it is there already; nothing runs."""
        if self.captures and shape not in self._graphs:
            found = self._capture(queue, self._twin(stream).handle)
            self._graphs[shape] = [self._instantiate(i, graph) for i, graph in enumerate(found)]

    def close(self) -> None:
        """Free all graphs; none is running."""
        graphs, self._graphs = self._graphs, {}
        capturing, self._capturing = self._capturing, {}
        for stream in capturing.values():
            stream.close()
        for graph in (graph for each in graphs.values() for graph in each):
            call(driver.cuGraphExecDestroy(graph))

    def _twin(self, stream: int) -> Stream:
        """Where launches for `stream` are captured: kernels of a graph have the priority of that stream."""
        if stream not in self._capturing:
            self._capturing[stream] = Stream(call(driver.cuStreamGetPriority(stream)), self._devices)
            self._capturing[stream].handle.stands_for = int(stream)
        return self._capturing[stream]

    def _capture(self, queue: Queue, stream: int) -> list[Any]:
        """The graph of what `queue` queues on each GPU's part of `stream`; nothing of it runs."""
        mode, handles = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, all_handles(stream)
        for number, handle in enumerate(handles):
            self._use(number)
            call(driver.cuStreamBeginCapture(handle, mode))
        self._use(0)
        try:
            queue(stream)
        except BaseException:
            for handle in handles:
                driver.cuStreamEndCapture(handle)
            raise
        return [self._end(number, handle) for number, handle in enumerate(handles)]

    def _end(self, number: int, handle: int) -> Any:
        """What was captured on the stream of GPU `number`."""
        self._use(number)
        try:
            return call(driver.cuStreamEndCapture(handle))
        finally:
            self._use(0)

    def _instantiate(self, number: int, graph: Any) -> Any:
        """The executable form of what GPU `number` does, which takes the place of `graph`."""
        self._use(number)
        try:
            return call(driver.cuGraphInstantiate(graph, 0))
        finally:
            call(driver.cuGraphDestroy(graph))
            self._use(0)

    def _use(self, number: int) -> None:
        """Make GPU `number` current, where there are several."""
        if len(self._devices) > 1:
            self._devices[number].use()

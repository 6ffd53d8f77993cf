"""Two of eight ranks with true shapes and random contents, on a GPU each or both on one, to be timed.

Each is the rank of `bench/rank.py`. Together they bring together what two ranks have: sums of two parts, logits of an
eighth of the vocabulary each. Alone a rank's launches are those of one rank, and nothing is waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import msgspec

from bench.rank import Rank, rank_of_eight, scored_tokens
from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena
from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.graphs import Graphs
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.machine import Machine, Setup, build_kernels, plan_sizes
from dsuf.cuda.rank_loader import RankView
from dsuf.cuda.ranks import RankedKernels, plan_rank_regions
from dsuf.cuda.split import RowSplit, plan_split
from dsuf.cuda.step import StepShape
from dsuf.cuda.streams import Sides, Stream, handle_on
from dsuf.cuda.weights import plan_weights

COUNT, WARM_UP = 2, 10

Run = Callable[[], None]


class Twin(Rank):
    """One of them: its view of the memory, for its contents and for what it does alone."""

    def __init__(self, device: Device, kernels: Kernels, config: ModelConfig, arena: Arena, rank: int, setup: Setup,
                 pages: int) -> None:  # fmt: skip
        self.device, self.kernels, self.config, self.setup = device, kernels, config, setup
        self.sizes, self.arena = plan_sizes(config, setup, pages), RankView(arena, rank)
        names = [region.name for region in plan_weights(config, draft=True, engram_on_host=False)[0]]
        self.weights = [arena.regions[name] for name in names]
        self.sides = Sides(2)

    def use(self) -> None:
        """Make its GPU the current one, for CuPy and for launches."""
        cupy.cuda.Device(self.device.index).use()
        self.device.use()


class Twins:
    """Both, the machine that they are together, and a stream on each GPU."""

    def __init__(self, devices: Sequence[Device], context_tokens: int, prefill_rows: int) -> None:
        self.config, self.gpus = rank_of_eight(), [device.index for device in devices]
        both = msgspec.structs.replace(self.config, vocab_size=COUNT * self.config.vocab_size)
        self.devices: Sequence[Device] = devices if len(set(self.gpus)) > 1 else ()
        setup = Setup(context_tokens=scored_tokens(context_tokens), max_turns=1, prefill_rows=prefill_rows)
        pages = plan_sizes(both, setup, 1).table_pages
        self.kernels = [build_kernels(device, self.config) for device in self.devices or devices[:1]]
        self.arena = Arena([*plan_rank_regions(both, setup, pages, COUNT), *plan_split()], COUNT, self.devices)
        self.twins = []
        for rank, device in enumerate(devices):
            self.use(rank)
            self.twins.append(
                Twin(device, self.kernels[rank % len(self.kernels)], self.config, self.arena, rank, setup, pages)
            )
        self.use(0)
        self.stream, self.sides = Stream(devices=self.devices), Sides(2, devices=self.devices)
        self.ranked = RankedKernels(self.kernels, self.arena, both, self.devices)
        self.split = RowSplit(self.ranked, self.arena, both.n_routed_experts)
        self.setup, self.both, self.pages = setup, both, pages

    def use(self, rank: int) -> None:
        """Make the GPU of `rank` the current one, for CuPy and for launches."""
        index = self.gpus[rank] if self.devices else self.gpus[0]
        cupy.cuda.Device(index).use()
        if self.devices:
            self.devices[rank].use()

    def each(self, do: Callable[[int, Twin], Any]) -> list[Any]:
        """What comes of `do` for every rank, with its GPU current; the first is current then."""
        found = []
        for rank, twin in enumerate(self.twins):
            self.use(rank)
            found.append(do(rank, twin))
        self.use(0)
        return found

    def fill(self) -> None:
        """Weights and caches, the same for both: what ranks compute alike stays alike."""
        self.each(lambda rank, twin: twin.fill())
        self.each(lambda rank, twin: cupy.cuda.Device().synchronize())

    def together(self, kernels: RankedKernels | None = None, *, splits: bool = False) -> Machine:
        """Both ranks as a machine, with other kernels than their own if there are."""
        sizes = plan_sizes(self.both, self.setup, self.pages)
        first = self.twins[0].device
        pad = self.both.engram_pad_id
        machine = Machine(first, kernels or self.ranked, self.arena, self.both, sizes, self.setup, pad,
                          devices=self.devices)  # fmt: skip
        machine.decoder.sides = machine.prefiller.sides = self.sides
        machine.prefiller.split = self.split if splits else None
        return machine

    def on(self, rank: int) -> int:
        """The stream of `rank` alone."""
        return int(handle_on(self.stream.handle, rank))

    def resets(self, shape: StepShape) -> Run:
        """What queues that all turns go back to the length of `shape`, on every rank."""
        reset = self.each(lambda rank, twin: twin.want(shape))

        def run() -> None:
            for rank in range(COUNT):
                self.use(rank)
                with cupy.cuda.ExternalStream(self.on(rank)):
                    reset[rank]()
            self.use(0)

        return run

    def capture(self, queue: Callable[[Machine, int], None], machine: Machine) -> Run:
        """What replays the launches that `queue` queues of both together."""
        graphs = Graphs(devices=self.devices)
        graphs.prepare("", lambda handle: queue(machine, handle), self.stream.handle)
        return lambda: graphs.run("", lambda handle: None, self.stream.handle)

    def capture_alone(self, queue: Callable[[Machine, int], None]) -> Run:
        """The same of each rank by itself."""

        def prepare(rank: int, twin: Twin) -> Graphs:
            graphs, machine = Graphs(), twin.branched(twin.kernels)
            graphs.prepare("", lambda handle: queue(machine, handle), self.on(rank))
            return graphs

        captured = self.each(prepare)

        def run() -> None:
            for rank, graphs in enumerate(captured[: COUNT if self.devices else 1]):
                self.use(rank)
                graphs.run("", lambda handle: None, self.on(rank))
            self.use(0)

        return run

    def time_ms(self, run: Run, before: Run, replays: int, warm_up: int = WARM_UP) -> list[list[float]]:
        """Milliseconds of each of `replays` runs on every GPU, in their order; they are queued one behind the other."""
        marks = []
        for _ in range(warm_up + replays):
            before()
            first = self._mark()
            run()
            marks.append((first, self._mark()))
        self.stream.synchronize()
        times = [
            [call(driver.cuEventElapsedTime(first, last)) for first, last in zip(*pair, strict=True)] for pair in marks
        ]
        for event in (event for pair in marks for each in pair for event in each):
            call(driver.cuEventDestroy(event))
        return [list(column) for column in zip(*times[warm_up:], strict=True)]

    def _mark(self) -> list[Any]:
        """An event on every GPU's stream."""
        events = []
        for rank in range(len(self.devices) or 1):
            self.use(rank)
            events.append(call(driver.cuEventCreate(0)))
            call(driver.cuEventRecord(events[-1], self.on(rank)))
        self.use(0)
        return events

    def close(self) -> None:
        """Wait, and free everything."""
        self.stream.synchronize()
        self.arena.close()

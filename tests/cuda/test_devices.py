"""Ranks with GPUs of their own, on a driver of the host: what is said of a stream is said on every GPU, what is written
is written to all, and when ranks have lost each other every turn hears of it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsuf.checkpoint.config import load_config
from dsuf.cuda import arena as arena_module
from dsuf.cuda.arena import Arena, Array, Region, fill_bytes, view_host, write_array
from dsuf.cuda.caches import Caches, CacheSizes
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.graphs import Graphs
from dsuf.cuda.machine import Setup
from dsuf.cuda.pages import PageCopier
from dsuf.cuda.states import SlotCopier, StateShape
from dsuf.cuda.streams import Event, Handle, Sides, Stream, all_handles, handle_on, make_each, worker_of
from dsuf.cuda.turns import plan_turns
from dsuf.errors import CommandError, DeviceError, EngineFailed, RequestError
from dsuf.types import PrefillRange, StepPlan
from tests.cuda.drive import make_turn
from tests.cuda.host import HostDriver, make_host_machine, use_host_driver
from tests.sched.rig import serving

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")


class Gpu:
    """Notes whose turn it is."""

    def __init__(self, number: int, current: list[int]) -> None:
        self.number, self.current = number, current

    def use(self) -> None:
        self.current[0] = self.number


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """Everything calls this one."""
    return use_host_driver(monkeypatch)


@pytest.fixture
def current() -> list[int]:
    return [0]


@pytest.fixture
def gpus(current: list[int]) -> list[Gpu]:
    """Three of them."""
    return [Gpu(number, current) for number in range(3)]


def test_each_is_made_on_its_own(gpus: list[Gpu], current: list[int]) -> None:
    """With that one current; the first is current in the end, also where making fails."""
    assert make_each(gpus, lambda: current[0]) == [0, 1, 2] and current == [0]
    assert make_each((), lambda: "one") == ["one"]

    def fail() -> None:
        if current[0] == 1:
            raise DeviceError("no")

    with pytest.raises(DeviceError):
        make_each(gpus, fail)
    assert current == [0]


def test_handles() -> None:
    """A plain one is everybody's."""
    handle = Handle.of([7, 8, 9])
    assert (handle, [handle_on(handle, rank) for rank in range(3)], all_handles(handle)) == (7, [7, 8, 9], (7, 8, 9))
    assert [handle_on(7, rank) for rank in range(3)] == [7] * 3 and all_handles(7) == (7,)
    assert (worker_of(7), worker_of(handle)) == (7, 7)
    handle.stands_for = 5
    assert worker_of(handle) == 5


def test_streams_and_events(gpus: list[Gpu], driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is recorded and waited for on every GPU, and is done when all are; all of it is given back."""
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(driver, "cuEventRecord", lambda event, stream: told.append(("record", event, stream)) or (0,))
    monkeypatch.setattr(
        driver, "cuStreamWaitEvent", lambda stream, event, flags: told.append(("wait", event, stream)) or (0,)
    )
    monkeypatch.setattr("dsuf.cuda.streams.call", lambda outcome: outcome[1] if len(outcome) > 1 else None)
    first, second, event = Stream(devices=gpus), Stream(devices=gpus), Event(gpus)
    first.record(event)
    second.follow(event)
    assert told == [("record", *pair) for pair in zip(event.handles, first.handle.all, strict=True)] + [
        ("wait", *pair) for pair in zip(event.handles, second.handle.all, strict=True)
    ]
    late = event.handles[2]
    monkeypatch.setattr(
        driver, "cuEventQuery", lambda handle: (driver.CUresult.CUDA_ERROR_NOT_READY if handle == late else 0,)
    )
    assert not event.done
    sides = Sides(2, 0, gpus)
    side = sides.fork(first.handle, 1)
    assert len(set(all_handles(side)) | set(first.handle.all)) == 6
    sides.join(first.handle, 1)
    for held in (sides, event, first, second):
        held.close()
    assert not driver.alive


def test_a_graph_on_each(gpus: list[Gpu], current: list[int], driver: HostDriver) -> None:
    """All are captured while the launches are queued once, and each is launched on its own stream with its GPU."""
    queued, launched = list[int](), list[tuple[int, int]]()
    launch = driver.cuGraphLaunch

    def note(graph: int, stream: int) -> Any:
        launched.append((current[0], stream))
        return launch(graph, stream)

    driver.cuGraphLaunch = note  # type: ignore[method-assign]
    with Stream(devices=gpus) as stream:
        graphs = Graphs(devices=gpus)
        for _ in range(2):
            graphs.run("a", queued.append, stream.handle)
        assert len(queued) == 1 and not set(all_handles(queued[0])) & set(stream.handle.all)
        assert worker_of(queued[0]) == stream.handle
        assert [what for what, _ in driver.told[:6]] == ["begin"] * 3 + ["end"] * 3
        assert launched == list(enumerate(stream.handle.all)) * 2 and current == [0]
        graphs.close()
    assert not driver.alive


def test_memory_of_each(gpus: list[Gpu], current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool on every GPU in the same layout, pinned memory in one; a GPU that has too little frees the others'."""
    freed: list[int] = []
    monkeypatch.setattr(arena_module, "_take_device", lambda size: 1000 * (5 - current[0]))
    monkeypatch.setattr(arena_module, "_take_pinned", lambda size: 50_000)
    monkeypatch.setattr(arena_module, "call", lambda outcome: None)
    monkeypatch.setattr(
        arena_module, "driver", type("Driver", (), {"cuMemFree": freed.append, "cuMemFreeHost": freed.append})
    )
    regions = [
        Region("a", "u8", (100,), "x"),
        Region("b", "i32", (4,), "x"),
        Region("c", "i32", (4,), "x", pinned=True),
    ]
    arena = Arena(regions, 3, gpus)
    assert [arena["a"].on(rank).pointer for rank in range(3)] == [5000, 4000, 3000]
    assert [arena["b"].on(rank).pointer for rank in range(3)] == [5256, 4256, 3256]
    assert [arena["c"].on(rank).pointer for rank in range(3)] == [50_000, 50_256, 50_512]
    arena.close()
    assert sorted(freed) == [3000, 4000, 5000, 50_000]

    def take(size: int) -> int:
        if current[0] == 2:
            raise CommandError("too little")
        return 1000 * (5 - current[0])

    freed.clear()
    monkeypatch.setattr(arena_module, "_take_device", take)
    with pytest.raises(CommandError):
        Arena(regions, 3, gpus)
    assert sorted(freed) == [4000, 5000]


class Doubled:
    """Some regions twice in host memory, as two ranks have them."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = {region.name: region for region in regions}
        size = sum(region.reserved_bytes for region in regions)
        self.held, self._arrays, at = np.zeros((2, size), np.uint8), dict[str, Array](), 0
        for region in regions:
            self._arrays[region.name] = Array(self.held.ctypes.data + at, region.kind, region.shape, (size,))
            at += region.reserved_bytes

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]


def test_what_is_written_is_written_to_all(driver: HostDriver, gpus: list[Gpu]) -> None:
    """Arrays, states of slots and pages; read is the first rank's."""
    sizes = CacheSizes(CONFIG, pages=6, slots=2, ring_rows=64, context_tokens=512)
    arena: Any = Doubled([*sizes.plan(), *plan_turns(CONFIG, sizes)])
    write_array(arena["turns.length"], np.array([3, 4]))
    assert [view_host(arena["turns.length"].on(rank)).tolist() for rank in range(2)] == [[3, 4]] * 2
    shape, rng = StateShape(sizes), np.random.default_rng(1)
    image = Array(int(driver.cuMemHostAlloc(shape.image_bytes, 0)[1]), "u8", (shape.image_bytes,))
    view_host(image)[:] = rng.integers(0, 256, shape.image_bytes)
    kept = view_host(image).copy()
    SlotCopier(arena, shape).write(1, image, Handle.of([0, 0]))
    copier, rows = PageCopier(arena, Caches(arena, sizes), gpus[:2]), [rng.bytes(sizes.page_bytes) for _ in range(3)]
    copier.write([1, 2, 5], [memoryview(row) for row in rows], [])
    assert arena.held.any() and np.array_equal(arena.held[0], arena.held[1])
    arena.held[1] = 0
    SlotCopier(arena, shape).read(1, image, 0)
    into = [bytearray(sizes.page_bytes) for _ in rows]
    copier.read([1, 2, 5], [memoryview(page) for page in into], [])
    assert np.array_equal(view_host(image), kept) and into == rows
    copier.close()


def test_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's bytes, each on its own stream."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(arena_module, "call", lambda outcome: None)
    monkeypatch.setattr(
        arena_module, "driver", type("D", (), {"cuMemsetD8Async": lambda at, value, size, to: told.append((at, to))})
    )
    fill_bytes(Array(100, "u8", (4,), (50, -60)), 1, Handle.of([7, 8, 9]))
    assert told == [(100, 7), (150, 8), (40, 9)]


async def test_when_ranks_have_lost_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn gets an error, whether it was under way, waited or comes later, and there is trouble to be told."""
    setup = Setup(context_tokens=700, max_turns=3, pages=20, prefill_rows=64)
    machine = make_host_machine(monkeypatch, CONFIG, setup)
    engine, lost, asked = CudaEngine(machine, "weights", "replay", captures=False), [False], [0]

    def check() -> None:
        asked[0] += 1
        if lost[0]:
            raise DeviceError("rank 0 did not hear of rank 1 in time")

    machine.check = check
    async with serving(engine, chunk_tokens=50, queue_limit=64, failing_steps=3, probe_s=0.05) as scheduler:

        async def hear(number: int) -> str:
            try:
                async for _ in scheduler.submit(make_turn(range(3, 20 + number), 200)):
                    lost[0] = lost[0] or asked[0] > 60
            except RequestError as error:
                return type(error).__name__
            return "heard"

        async with asyncio.timeout(20):
            said = await asyncio.gather(*[hear(number) for number in range(9)])
            assert lost[0] and {"EngineFailed"} <= set(said) <= {"EngineFailed", "Unavailable", "heard"}
            while scheduler.trouble is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert scheduler.trouble.startswith("engine:")
            assert await hear(1) == "Unavailable"
            await asyncio.sleep(0.3)
            assert scheduler.trouble is not None, "a probe must fail as well"
    await engine.close()


async def test_a_launching_thread_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's call can wait for a rank that stalls: who waits for the thread that makes it hears of the rank."""
    setup = Setup(context_tokens=700, max_turns=3, pages=20, prefill_rows=64)
    machine = make_host_machine(monkeypatch, CONFIG, setup)
    machine.devices = (machine.device, machine.device)
    engine, lost, free = CudaEngine(machine, "weights", "replay", captures=False), [False], threading.Event()

    def check() -> None:
        if lost[0]:
            raise DeviceError("rank 0 did not hear of rank 1 in time")

    machine.check = check
    turn = make_turn(range(3, 20), 50)
    engine.attach(turn, range(2))
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 0, 17),)))
    engine._worker.submit(free.wait)
    asking = [engine.step(StepPlan(decode=(turn.id,))), engine.read_state(turn.id)]
    lost[0] = True
    try:
        async with asyncio.timeout(20):
            for call in asking:
                with pytest.raises(EngineFailed, match="did not hear of rank 1"):
                    await call
    finally:
        free.set()
        lost[0] = False
    await engine.close()

"""Weights reach their places, and launches are captured once, on a driver of the host."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.synthetic import write_synthetic
from dsuf.cuda import weights
from dsuf.cuda.arena import Array, view_host
from dsuf.cuda.graphs import Graphs
from dsuf.cuda.kernels import Kernels
from dsuf.cuda.streams import Sides, Stream
from dsuf.cuda.weights import arrange_experts, load_weights, plan_weights
from dsuf.errors import CheckpointError, DeviceError
from tests.cuda.host import HostArena, HostDriver, use_host_driver
from tests.cuda.paper import PaperKernels

TINY = Path(__file__).parents[1] / "golden" / "tiny"
DEVICE: Any = SimpleNamespace(use=lambda: None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """Everything calls this one."""
    return use_host_driver(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random checkpoint of the golden set's sizes."""
    directory = tmp_path_factory.mktemp("model")
    write_synthetic(directory, load_config(TINY / "config.json"), 3, (TINY / "tokenizer.json").read_bytes())
    return Checkpoint.open(directory)


@pytest.mark.parametrize("engram_on_host", [False, True])
def test_every_byte_arrives(
    driver: HostDriver, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, engram_on_host: bool
) -> None:
    """All tensors, those larger than a buffer too, are in their places; progress counts every byte once."""
    monkeypatch.setattr(weights, "STAGING_BYTES", 1000)
    regions, placements = plan_weights(checkpoint.config, draft=True, engram_on_host=engram_on_host)
    arena, arrived = HostArena(regions), list[int]()
    load_weights(arena, placements, checkpoint.tensor, DEVICE, arrived.append)
    for placement in placements:
        stored = np.ascontiguousarray(checkpoint.tensor(placement.tensor)).reshape(-1).view(np.uint8)
        region = arena[placement.region]
        there = view_host(Array(region.pointer + placement.offset_bytes, "u8", (len(stored),)))
        assert np.array_equal(there, stored), placement.tensor
    assert sum(arrived) == sum(region.bytes for region in regions)
    assert not driver.alive and not driver.memory


def test_a_tensor_that_cannot_be_read(driver: HostDriver, checkpoint: Checkpoint) -> None:
    """The failure of one thread is the failure of the load; buffers and streams are given back."""
    regions, placements = plan_weights(checkpoint.config, draft=True, engram_on_host=False)
    broken = placements[len(placements) // 2].tensor

    def tensor(name: str) -> Any:
        if name == broken:
            raise CheckpointError(f"{name}: cannot be read")
        return checkpoint.tensor(name)

    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(HostArena(regions), placements, tensor, DEVICE, lambda arrived: None)
    assert not driver.alive and not driver.memory


def test_codes_are_arranged(driver: HostDriver, checkpoint: Checkpoint) -> None:
    """Once for every matrix of routed experts, all of it, and for nothing else."""
    regions, _ = plan_weights(checkpoint.config, draft=True, engram_on_host=False)
    arena, kernels = HostArena(regions), PaperKernels(checkpoint.config)
    arrange_experts(arena, cast(Kernels, kernels))
    found = {(values["codes"].pointer, values["count"] * 16) for _, values in kernels.launches}
    experts = [region for region in regions if ".experts." in region.name and region.name.endswith(".weight")]
    assert {entry for entry, _ in kernels.launches} == {"arrange_codes"}
    assert found == {(arena[region.name].pointer, region.bytes) for region in experts}
    assert len(kernels.launches) == len(experts) == 3 * (checkpoint.config.n_layers + checkpoint.config.n_mtp_layers)


def note(queued: list[int]) -> Callable[[int], None]:
    """Queues nothing but a note of the stream."""
    return queued.append


def test_captured_once(driver: HostDriver) -> None:
    """A shape is queued once and replayed as often as it is run; another shape is another graph."""
    queued, stream = list[int](), Stream()
    with stream:
        graphs = Graphs()
        graphs.prepare("a", note(queued), stream.handle)
        for shape in ("a", "a", "b"):
            graphs.run(shape, note(queued), stream.handle)
        assert (len(set(queued)), len(queued), len(graphs)) == (1, 2, 2)
        assert [what for what, _ in driver.told] == ["begin", "end", "launch", "launch", "begin", "end", "launch"]
        graphs.close()
    assert not driver.alive


def test_not_captured(driver: HostDriver) -> None:
    """Without capturing everything is queued every time."""
    queued, stream = list[int](), Stream()
    with stream:
        graphs = Graphs(captures=False)
        for _ in range(3):
            graphs.run("a", note(queued), stream.handle)
    assert (len(queued), driver.told) == (3, [])


def test_a_launch_that_fails_in_a_capture(driver: HostDriver) -> None:
    """The capture is ended, nothing is kept, and the next try captures anew."""

    def fail(stream: int) -> None:
        raise DeviceError("no")

    with Stream() as stream:
        graphs = Graphs()
        with pytest.raises(DeviceError):
            graphs.run("a", fail, stream.handle)
        assert [what for what, _ in driver.told] == ["begin", "end"]
        assert len(graphs) == 0
        graphs.run("a", note([]), stream.handle)
        graphs.close()


def test_a_stream_is_asked_while_its_graph_is_captured(driver: HostDriver) -> None:
    """A step that is under way is waited for on one thread while the next one's shape is captured on another."""
    with Stream(-3) as stream:
        graphs = Graphs()

        def look(capturing: int) -> None:
            assert driver.capturing == {capturing} and driver.priorities[capturing] == -3
            stream.check()

        for shape in "ab":
            graphs.run(shape, look, stream.handle)
        graphs.close()
    assert not driver.alive and not driver.capturing


def test_sides(driver: HostDriver) -> None:
    """A side stream is another stream, the same for the same number, and all of it is given back."""
    with Stream() as main:
        sides = Sides(2)
        first, second = sides.fork(main.handle, 0), sides.fork(main.handle, 1)
        assert len({main.handle, first, second}) == 3
        for number in (0, 1):
            sides.join(main.handle, number)
        assert sides.fork(main.handle, 0) == first
        sides.close()
    assert not driver.alive

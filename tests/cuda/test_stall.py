"""The part of the campaign of ranks that holds one up, on the toy machine: all hear of it, the node is not ready."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.campaigns import stall
from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.errors import DeviceError
from tests.cuda.host import make_host_machine

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")


async def test_everybody_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns under way, those that wait, and one that comes later; before, the node was ready."""
    machine = make_host_machine(monkeypatch, CONFIG, Setup(context_tokens=700, max_turns=3, pages=20, prefill_rows=64))
    driver: Any = machine.device.driver  # type: ignore[attr-defined]
    held = list[tuple[int, int]]()

    def check() -> None:
        if held:
            raise DeviceError("rank 0 did not hear of rank 1 in time")

    def wait_value(stream: int, word: int, value: int, flags: int) -> tuple[Any]:
        held.append((stream, word))
        return (driver.CUresult.CUDA_SUCCESS,)

    driver.cuStreamWaitValue32 = wait_value
    driver.CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    driver.CU_MEMHOSTALLOC_PORTABLE = driver.CU_MEMHOSTALLOC_DEVICEMAP = 0
    monkeypatch.setattr(stall, "driver", driver)
    machine.check, machine.devices = check, (machine.device, machine.device)
    engine = CudaEngine(machine, "weights", "exact", captures=False)
    second = engine._launcher.decode_stream.handle.all[1]
    found: dict[str, Any] = await stall.stall_served(engine, [np.arange(3, 20), np.arange(5, 60)])
    assert [stream for stream, _ in held] == [second]
    assert found["errors"] + found["ended_before"] == found["asked"] == 9 and found["errors"] >= 3
    assert "did not hear of rank 1" in found["says"] and found["first_error_s"] < 5
    assert found["later"].startswith("Unavailable") and found["ready_before"] and not found["ready_after"]
    assert found["failing"].startswith("engine:")
    await engine.close()

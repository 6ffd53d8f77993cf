"""The bench of two ranks, run through on paper: every launch is checked as a real one is, nothing is computed."""

import ctypes
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsuf.checkpoint.config import load_config
from dsuf.cuda import arena, prefill
from tests.bench.paper_cupy import make_cupy
from tests.cuda.host import SUCCESS, use_host_driver
from tests.cuda.paper import PaperKernels

pytestmark = pytest.mark.full
CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
MODULES = ("pair", "twins", "waits", "rank", "prefill", "step", "synthetic", "launchlist", "ceiling")


class Gpus:
    """A driver of two GPUs that have the host's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver: Any = use_host_driver(monkeypatch)
        self.driver.CU_MEMHOSTALLOC_PORTABLE = self.driver.CU_MEMHOSTALLOC_DEVICEMAP = 0
        self.driver.cuMemGetInfo = lambda: (SUCCESS, 8 << 30, 8 << 30)
        self.driver.cuMemAlloc = lambda size: self.driver.cuMemHostAlloc(size, 0)
        self.driver.cuMemFree = self.driver.cuMemFreeHost
        self.driver.cuMemsetD8 = lambda at, value, size: (ctypes.memset(at, value, size) and (SUCCESS,)) or (SUCCESS,)
        self.driver.cuEventElapsedTime = lambda first, last: (SUCCESS, float(last - first))
        self.devices = [SimpleNamespace(index=i, name="paper", use=lambda: None) for i in range(2)]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The bench with small sizes, results kept apart."""
    with make_cupy() as cupy:
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        kept = {name: sys.modules.pop(name) for name in [f"bench.{each}" for each in MODULES] if name in sys.modules}
        module, gpus = importlib.import_module("bench.pair"), Gpus(monkeypatch)
        twins: Any = sys.modules["bench.twins"]
        monkeypatch.setattr(twins, "driver", gpus.driver)
        monkeypatch.setattr(twins, "rank_of_eight", lambda: CONFIG)
        monkeypatch.setattr(twins, "build_kernels", lambda device, config: PaperKernels(config))
        monkeypatch.setattr(module, "count_devices", lambda: 2)
        monkeypatch.setattr(module, "open_devices", lambda count: gpus.devices)
        monkeypatch.setattr(module, "gpu_state", lambda: "")
        monkeypatch.setattr("bench.report.RESULTS", tmp_path)
        monkeypatch.setattr(sys, "argv", ["pair.py", "--prefill", "32", "--replays", "3", "--context", "1024"])
        yield module
        for name in MODULES:
            sys.modules.pop(f"bench.{name}", None)
        sys.modules.update(kept)


def run(pair: Any, tmp_path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Its exit code, and the rows that it has written."""
    with pytest.raises(SystemExit) as ended:
        pair.main()
    return int(ended.value.code), json.loads((tmp_path / "pair.json").read_text())["rows"]  # type: ignore[arg-type]


def test_all_parts(pair: Any, tmp_path: Path) -> None:
    """A step five ways, waits and skew with unequal numbers of meetings, a pass of each kind three ways."""
    code, rows = run(pair, tmp_path)
    assert code == 0 and all(row["gpus"] == 2 and row["median_ms"] > 0 for row in rows)
    by = [(row["what"], row["by"]) for row in rows]
    ways = ["alone", "together", "together, rows divided"]
    assert by[:6] == [(kind, way) for kind in ("encode", "forward") for way in ways]
    assert [way for what, way in by[6:]] == [
        "alone", "together", "together, sums launched", "together, waits noted", "together, nobody waits",
    ]  # fmt: skip
    noted = rows[9]
    assert noted["meetings"] > 20 and noted["waited_us"][1] > noted["waited_us"][0] > 0


def test_what_breaks_off_keeps_nothing_back(pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what came before nor what follows, and the exit code says so."""
    monkeypatch.setattr(prefill.Prefiller, "put_rows", lambda *values: arena.view_host(None))  # type: ignore[arg-type]
    code, rows = run(pair, tmp_path)
    assert code == 1 and {row["what"] for row in rows} == {"step"} and len(rows) == 5

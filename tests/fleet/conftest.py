"""Fleets of processes, which end with the test whatever happens."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsuf.errors import CommandError
from dsuf.trial.fleet import TrialFleet, find_program
from tests.fleet.rig import find_ports
from tests.node.conftest import model_dir  # noqa: F401

Start = Callable[..., TrialFleet]


def skip_without_programs() -> None:
    """Skip where Redis or the balancer is not installed."""
    try:
        for name in ("redis-server", "haproxy"):
            find_program(name)
    except CommandError as error:
        pytest.skip(f"no fleet of processes: {error}")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts fleets: `start(count, *flags, prefill=0)`. Skips where Redis or the balancer is not installed."""
    skip_without_programs()
    fleets: list[TrialFleet] = []

    def begin(count: int, *flags: str, prefill: int = 0) -> TrialFleet:
        folder = tmp_path / f"fleet{len(fleets)}"
        folder.mkdir()
        given = ("--cache-bytes", str(96 << 20), "--threads", "1", *flags)
        fleets.append(TrialFleet(count, folder, port=find_ports(), prefill=prefill, flags=given))
        fleets[-1].start()
        return fleets[-1]

    yield begin
    for fleet in fleets:
        for program in fleet.programs:
            program.kill()

"""Peers and Redis fail while caches travel: turns answer as ever, in time, and nothing is left behind."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fleet.alone import Alone
from tests.fleet.breakage import Breakage
from tests.fleet.clocks import find_compiler
from tests.fleet.conftest import skip_without_programs
from tests.fleet.faults import FAULTS

pytestmark = [
    pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Breakage]:
    """One fleet for all faults: what a fault leaves behind, the next one finds."""
    skip_without_programs()
    folders: list[Path] = [tmp_path_factory.mktemp(name) for name in ("alone", "fleet")]
    async with Alone(folders[0]) as alone, Breakage(folders[1], alone.replies) as rig:
        yield rig


@pytest.mark.parametrize(
    ("number", "fault"), [(number, fault) for number in range(3) for fault in FAULTS if number == 0 or fault != "none"]
)
async def test_a_fault_during_pulls_costs_time_and_nothing_else(rig: Breakage, fault: str, number: int) -> None:
    if fault == "clocks off" and find_compiler() is None:
        pytest.skip("no C compiler on this machine")
    found = await rig.run(fault, number)
    print(found)
    assert not found.problems, found

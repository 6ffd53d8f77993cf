"""Random schedules on the reference engine. In exact mode: tokens and cache bytes of lone cold runs. In replay mode:
with drafts what the audit gives without."""

import time
from collections import Counter
from functools import partial

import msgspec
import pytest

from tests.turns.half import METRICS
from tests.turns.reference import Oracle, ReferenceWorld, ReplayWorld, make_greedy
from tests.turns.schedule import draw
from tests.turns.shrink import shrink
from tests.turns.test_schedules import quiet  # noqa: F401 - a fixture
from tests.turns.world import find_fault

SHORT = 4
FULL = 200
BLOCK = 10


def check(oracle: Oracle, seeds: range, kind: type[ReferenceWorld] = ReferenceWorld) -> Counter[str]:
    """Play the schedules of `seeds`; what occurred in all of them. Fails with the smallest form of a wrong one."""
    total: Counter[str] = Counter()
    make_world = partial(kind, oracle=oracle)
    for seed in seeds:
        schedule = make_greedy(draw(seed))
        if kind is ReplayWorld:
            setting = msgspec.structs.replace(
                schedule.setting, audits=True, drafts=schedule.setting.drafts or 2, hands_over=False, blocks=120,
                pages=1024 // schedule.setting.page_tokens,
            )  # fmt: skip
            schedule = msgspec.structs.replace(schedule, setting=setting)
        fault = find_fault(schedule, total, make_world)
        if fault is not None:
            small = shrink(schedule, lambda other: find_fault(other, None, make_world) is not None, trials=30)
            pytest.fail(f"seed {seed}: {fault}\nas small as it gets: {small}")
    return total


@pytest.mark.full
def test_schedules(oracle: Oracle) -> None:
    started_s = time.monotonic()
    total = check(oracle, range(SHORT))
    print(f"{SHORT} schedules in {time.monotonic() - started_s:.1f} s: {dict(total)}")
    assert total["compared"] > total["whole"] > 0 < total["device"]


@pytest.mark.full
@pytest.mark.parametrize("start", range(SHORT, FULL + SHORT, BLOCK))
def test_many_schedules(oracle: Oracle, start: int, capsys: pytest.CaptureFixture[str]) -> None:
    started_s = time.monotonic()
    total = check(oracle, range(start, start + BLOCK))
    with capsys.disabled():
        print(f"\n{BLOCK} schedules from {start}: {time.monotonic() - started_s:.1f} s, {total['compared']} caches")
    assert total["compared"] and (total["device"] or total["host"])


@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(3, 63, BLOCK))])
def test_drafts_are_audited_in_replay_mode(oracle: Oracle, start: int) -> None:
    """That an audit found nothing else is looked at in every schedule."""
    before = METRICS._audits.labels("same")._value.get()
    check(oracle, range(start, start + (BLOCK if start else 3)), ReplayWorld)
    assert METRICS._audits.labels("same")._value.get() > before

"""Random schedules over the toy engine: arrivals, leaving, deadlines, small stores, faults, damage, all at once.

A schedule that goes wrong is made small and shown; `draw(seed)` makes it again.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from dsuf.kv import loader
from dsuf.kv.holding import Holding
from dsuf.kv.pages import PagePool
from dsuf.kv.sources import Sources
from dsuf.sched.held import Held
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Usage
from tests.turns.schedule import draw
from tests.turns.shrink import shrink
from tests.turns.world import find_fault

SHORT = 120
FULL = 10_000
BLOCK = 250
EXPECTED = (
    "whole", "left", "again", "device", "host", "flip", "ruin", "DeadlineExceeded", "EngineFailed", "Unavailable",
    "QueueFull", "ContextTooLong", "raises step", "slow step", "raises resume", "slow resume", "raises read_state",
    "slow read_state", "raises read_pages", "slow read_pages", "raises write_pages", "slow write_pages",
    "peer", "raises far step", "slow far step", "raises offer", "slow offer", "raises read", "slow read",
    "raises release", "slow release", "raises leave", "slow leave", "stopped",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are logged with tracebacks; here they are planned."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(seeds: range) -> Counter[str]:
    """Play the schedules of `seeds`; what occurred in all of them. Fails with the smallest form of a wrong one."""
    total: Counter[str] = Counter()
    for seed in seeds:
        schedule = draw(seed)
        fault = find_fault(schedule, total)
        if fault is not None:
            small = shrink(schedule, lambda other: find_fault(other) is not None)
            pytest.fail(f"seed {seed}: {fault}\nas small as it gets: {small}\nwhich ends so: {find_fault(small)}")
    return total


@pytest.mark.full
def test_schedules() -> None:
    started_s = time.monotonic()
    total = check(range(SHORT))
    print(f"{SHORT} schedules in {time.monotonic() - started_s:.1f} s: {dict(total)}")
    assert [name for name in EXPECTED if not total[name]] == [], "what should occur did not"
    assert total["whole"] > SHORT


@pytest.mark.full
@pytest.mark.parametrize("start", range(SHORT, FULL + SHORT, BLOCK))
def test_many_schedules(start: int, capsys: pytest.CaptureFixture[str]) -> None:
    started_s = time.monotonic()
    total = check(range(start, start + BLOCK))
    with capsys.disabled():
        print(
            f"\n{BLOCK} schedules from {start} in {time.monotonic() - started_s:.1f} s, {total['whole']} whole answers"
        )


def test_a_schedule_is_the_same_again() -> None:
    for seed in range(5):
        first, second = Counter[str](), Counter[str]()
        assert find_fault(draw(seed), first) is find_fault(draw(seed), second) is None
        assert first == second and draw(seed) == draw(seed)


class Same:
    """Equal to every other checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def leaves_too_soon(held: Held) -> bool:
    """Whether nothing is under way for `held`, but for steps."""
    return held.leaving is not None and not (held.filling or held.reading)


def names_one_too_many(sources: Sources, holding: Holding, pages: int) -> None:
    """Name pages, and one that is not whole."""
    whole = 0 if holding.trace is None else holding.trace.length // holding.trace.page_tokens
    NAME(sources, holding, min(pages + 1, whole))


def tells_anew(ticket: TurnTicket, source: Usage) -> None:
    """Let the last stay in the engine say where the prompt came from."""
    ticket._prompt_usage = source


NAME = Sources.name
PLANTED: dict[str, Callable[[], list[Any]]] = {
    "checksums_agree": lambda: [patch.object(loader, name, lambda *_: Same()) for name in ("seal", "seal_point")],
    "detached_in_a_step": lambda: [patch.object(Held, "may_go", property(leaves_too_soon))],
    "begun_page_shared": lambda: [patch.object(Sources, "name", names_one_too_many)],
    "usage_of_the_last_stay": lambda: [patch.object(TurnTicket, "take_over", tells_anew)],
    "pages_not_retained": lambda: [patch.object(PagePool, "retain", lambda pool, pages: None)],
    "tenants_mixed": lambda: [patch("dsuf.kv.trace.msgspec.json.encode", lambda parts: b"")],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    with ExitStack() as stack:
        for change in PLANTED[name]():
            stack.enter_context(change)
        assert any(find_fault(draw(seed)) is not None for seed in range(SHORT))


def test_what_goes_wrong_is_made_small() -> None:
    with patch.object(Held, "may_go", property(leaves_too_soon)):
        schedule = next(one for one in map(draw, range(100)) if find_fault(one) is not None)
        small = shrink(schedule, lambda other: find_fault(other) is not None, trials=60)
        assert find_fault(small) is not None
    assert find_fault(small) is None
    assert len(str(small)) < len(str(schedule))

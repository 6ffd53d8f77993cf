"""The shipped model in a fleet: what earlier turns told is found again, whichever node is asked."""

import asyncio

import pytest

from tests.fleet.conftest import Start
from tests.fleet.needles import compare, tabulate
from tests.fleet.rig import opening, wait_settled

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(500)]
SESSIONS = 6
TEXTS = [opening(number, 150) for number in range(SESSIONS)]


async def test_needles_through_the_balancer(start: Start) -> None:
    """Every later turn reuses its beginning, and replies are those of one node. The campaign does forty sessions."""
    flags = ("--prefill", "exact")
    fleet, alone = await asyncio.to_thread(start, 3, *flags), await asyncio.to_thread(start, 1, *flags)
    found = await compare(fleet.url, alone.node_url(1), SESSIONS, TEXTS)
    print(tabulate(found, "short"), found.wrong)
    assert found.equal == SESSIONS
    assert found.without_reuse == 0
    assert found.tokens["peer_tokens"] > 0.05 * sum(found.tokens.values()), found.tokens
    for number in (1, 2, 3):
        await wait_settled(fleet.node_url(number))

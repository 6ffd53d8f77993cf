"""The shipped model in a fleet: what earlier turns told is found again, whichever node is asked."""

import asyncio

import pytest

from tests.fleet.conftest import Start
from tests.fleet.needles import compare, tabulate
from tests.fleet.rig import wait_settled

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(500)]
SESSIONS = 6
TEXTS = (
    "The bakery at the corner opens before it is light. Two people work there in the early hours: one of them "
    "weighs the flour and the salt, the other one looks after the oven, which is older than the house next door. On"
    " most days the first loaves are ready when the tram comes by for the first time, and the driver stops for a "
    "moment to buy one. When it rains the line of people outside is shorter, and what is left goes to the school "
    "across the street. Nobody remembers a day on which the shop was closed, not even the one on which the whole "
    "town had no light.",
    "A map of the coast was drawn by a man who had never seen the sea. He had letters from sailors, who told him "
    "how long they had been on their way and which stars they had seen, and he put all of that together at a small "
    "desk. Where two of the letters did not agree he drew both lines, one of them thin. Ships used his map for many"
    " years. When somebody measured the coast again, with better tools, most of the thick lines were where they "
    "should be, and so were some of the thin ones; but of the islands he had drawn, one was never found.",
)
"""Long enough to be fetched from another node, and of no help with any question."""


async def test_needles_through_the_balancer(start: Start) -> None:
    """Every answer is right, every later turn reuses its beginning, and replies are those of one node.

    The campaign does forty sessions, with the patience that nodes have by themselves. Here they have more: on a machine
    with much else to do a peer may take longer than computing is thought to take, and the turn is right to compute.
    """
    flags = ("--prefill", "exact", "--peer-patience", "5")
    fleet, alone = await asyncio.to_thread(start, 3, *flags), await asyncio.to_thread(start, 1, *flags)
    found = await compare(fleet.url, alone.node_url(1), SESSIONS, TEXTS)
    print(tabulate(found, "short"), found.wrong)
    assert found.right == found.questions == 5 * SESSIONS, found.wrong
    assert found.equal == SESSIONS
    assert found.without_reuse == 0
    assert found.tokens["peer_tokens"] > 0, found.tokens
    for number in (1, 2, 3):
        await wait_settled(fleet.node_url(number))

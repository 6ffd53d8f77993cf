"""A node can always leave: also with a peer that stands still, or with Redis that does."""

import asyncio
import signal
import time

import aiohttp
import pytest

from tests.fleet.conftest import Start
from tests.fleet.rig import Chat, opening, wait_settled

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(200)]
LEAVE_S = 30.0
"""Ten seconds for sessions to be fetched, two for the directory, and what a busy machine needs."""


@pytest.mark.parametrize("frozen", ["peer", "redis"])
async def test_a_node_leaves_in_time(start: Start, frozen: str) -> None:
    """It has sessions to give away, and a connection over which something is on its way."""
    fleet = await asyncio.to_thread(start, 2, "--prefill", "exact")
    async with aiohttp.ClientSession() as session:
        chats = [Chat(session, opening(number, 150)) for number in range(2)]
        for chat, number in zip(chats, (1, 2), strict=True):
            await chat.ask(fleet.node_url(number))
            chat.say("Go on.")
        await asyncio.sleep(0.5)
        await chats[0].ask(fleet.node_url(2))
        await chats[1].ask(fleet.node_url(1))
        await Chat(session, opening(3, 150)).ask(fleet.node_url(1))  # which nobody else has
        for chat in chats:
            chat.say("Go on.")
        stopped = fleet.redis if frozen == "redis" else fleet.nodes[1]
        stopped.send(signal.SIGSTOP)
        began_s = time.monotonic()
        turn = asyncio.ensure_future(chats[1].ask(fleet.node_url(1)))  # here already: nobody need be asked
        await asyncio.sleep(0.3)
        fleet.nodes[0].send(signal.SIGTERM)
        assert await asyncio.to_thread(fleet.nodes[0].wait, LEAVE_S), fleet.nodes[0].tail()
        print(f"{frozen} stood still: left within {time.monotonic() - began_s:.1f} s")
        assert fleet.nodes[0].code == 0, fleet.nodes[0].tail()
        await turn
        stopped.send(signal.SIGCONT)
        await chats[0].ask(fleet.node_url(2))
    facts = await wait_settled(fleet.node_url(2))
    assert facts["fleet"]["guests"]["peers"] == 0

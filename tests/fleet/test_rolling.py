"""All nodes are replaced, one after the other, while conversations go on through the balancer."""

import asyncio
import signal

import aiohttp
import pytest

from dsuf.trial.fleet import TrialFleet
from tests.fleet.conftest import Start
from tests.fleet.rig import Chat, add_up, opening, wait_known, wait_settled

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(300)]
TALKS = 6
WORDS = 200


async def replace_all(fleet: TrialFleet) -> None:
    """End each node as an operator does, and start it again, before the next one's turn comes."""
    for number, node in enumerate(fleet.nodes, start=1):
        node.send(signal.SIGTERM)
        assert await asyncio.to_thread(node.wait, 60.0), f"{node.name} does not end:\n{node.tail()}"
        assert node.code == 0, node.tail()
        node.start()
        await asyncio.to_thread(fleet.wait_ready, number)
        await wait_known(fleet.node_url(number))
        await asyncio.sleep(1.0)  # the balancer sees it


async def test_no_turn_fails_and_hardly_anything_is_computed_twice(start: Start) -> None:
    fleet = await asyncio.to_thread(start, 3, "--prefill", "exact", "--drain-s", "30")
    over = asyncio.Event()
    async with aiohttp.ClientSession() as session:

        async def talk(number: int) -> Chat:
            chat = Chat(session, opening(number, WORDS))
            while not over.is_set():
                await chat.ask(fleet.url, max_tokens=4)
                chat.say(f"And then, part {len(chat.replies)}?")
                await asyncio.sleep(1.0)
            return chat

        talks = [asyncio.ensure_future(talk(number)) for number in range(TALKS)]
        try:
            await asyncio.sleep(3.0)
            await replace_all(fleet)
        finally:
            over.set()
            chats = await asyncio.gather(*talks)
        held, again = sum(chat.held_tokens for chat in chats), sum(chat.recomputed_tokens for chat in chats)
        print(f"{sum(len(chat.replies) for chat in chats)} turns, {held} tokens held, {again} computed again")
        print(add_up(chats, first=False))
        assert min(len(chat.replies) for chat in chats) >= 6
        assert again <= 0.05 * held
        fresh = await asyncio.to_thread(start, 1, "--prefill", "exact")
        for number in range(2):  # two will do: the rest goes through the same hands
            alone = Chat(session, opening(number, WORDS))
            for turn in range(len(chats[number].replies)):
                await alone.ask(fresh.node_url(1), max_tokens=4)
                alone.say(f"And then, part {turn + 1}?")
            assert alone.replies == chats[number].replies
    for number in (1, 2, 3):
        await wait_settled(fleet.node_url(number))

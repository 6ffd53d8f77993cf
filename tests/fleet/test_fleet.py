"""Any node of a fleet resumes any session: real processes, Redis, a balancer, the reference engine."""

import asyncio
import signal
import time

import aiohttp
import pytest

from tests.fleet.conftest import Start
from tests.fleet.rig import Chat, add_up, opening, wait_known, wait_settled

pytestmark = [pytest.mark.needs_redis, pytest.mark.timeout(400)]


@pytest.mark.full
async def test_turns_of_a_conversation_on_every_node_in_turn(start: Start) -> None:
    """Each later turn takes its beginning from the node before, and the tokens are those of one node alone."""
    fleet = await asyncio.to_thread(start, 3, "--prefill", "exact")
    async with aiohttp.ClientSession() as session:
        around, alone = (Chat(session, opening(1, 300)) for _ in range(2))
        for turn in range(5):
            await around.ask(fleet.node_url(turn % 3 + 1))
            around.say(opening(10 + turn, 100))
            await asyncio.sleep(0.3)  # the news that a node has it
        around_later = add_up([around], first=False)
        # Computed is what was said since the last turn, wherever that was answered.
        assert around_later["peer_tokens"] > 0.3 * sum(around_later.values()), around_later
        assert around_later["computed_tokens"] < 0.35 * sum(around_later.values()), around_later
        # A node that has seen nothing of it.
        fresh = await asyncio.to_thread(start, 1, "--prefill", "exact")
        for turn in range(5):
            await alone.ask(fresh.node_url(1))
            alone.say(opening(10 + turn, 100))
        assert alone.replies == around.replies
    for number in (1, 2, 3):
        facts = await wait_settled(fleet.node_url(number))
        assert facts["fleet"]["trouble"] is None and len(facts["fleet"]["members"]) == 2


@pytest.mark.full
async def test_a_node_that_leaves_gives_its_sessions_away(start: Start) -> None:
    """After SIGTERM the next turn finds its beginning on a node that it never met."""
    fleet = await asyncio.to_thread(start, 2)
    async with aiohttp.ClientSession() as session:
        chats = [Chat(session, opening(number, 250)) for number in range(3)]
        for chat in chats:
            await chat.ask(fleet.node_url(1))
            chat.say("Go on.")
        fleet.nodes[0].send(signal.SIGTERM)
        assert await asyncio.to_thread(fleet.nodes[0].wait, 30.0) and fleet.nodes[0].code == 0
        for chat in chats:
            await chat.ask(fleet.node_url(2))
        later = add_up(chats, first=False)
        assert later["computed_tokens"] < 0.35 * sum(later.values()), later
    await wait_settled(fleet.node_url(2))


async def test_prefill_and_decode_nodes(start: Start) -> None:
    """A decode node answers with a prompt that a prefill node computed; when that is gone it computes by itself."""
    fleet = await asyncio.to_thread(start, 2, "--prefill", "exact", prefill=1)
    async with aiohttp.ClientSession() as session:
        apart, lost = Chat(session, opening(2, 300)), Chat(session, opening(3, 300))
        details = await apart.ask(fleet.url)
        assert details["peer_tokens"] > 0.5 * sum(details[name] for name in ("peer_tokens", "computed_tokens")), details
        fleet.nodes[0].send(signal.SIGKILL)
        details = await lost.ask(fleet.url)
        assert details["peer_tokens"] == 0 and details["computed_tokens"] > 300
        fresh = await asyncio.to_thread(start, 1, "--prefill", "exact")
        for chat, number in ((apart, 2), (lost, 3)):
            other = Chat(session, opening(number, 300))
            await other.ask(fresh.node_url(1))
            assert other.replies == chat.replies
    await wait_settled(fleet.node_url(2))


@pytest.mark.full
async def test_a_node_for_prompts_that_stands_still_costs_no_more_than_computing(start: Start) -> None:
    """The turn that had asked it, and none after that; when it goes on it is asked again."""
    fleet = await asyncio.to_thread(start, 2, prefill=1)
    async with aiohttp.ClientSession() as session:
        took_s = []
        for number in range(5, 10):
            if number == 6:
                fleet.nodes[0].send(signal.SIGSTOP)
            if number == 8:
                fleet.nodes[0].send(signal.SIGCONT)
                await asyncio.sleep(8.0)  # it is left alone for a time
            began_s = time.monotonic()
            details = await Chat(session, opening(number, 300)).ask(fleet.url)
            took_s.append(time.monotonic() - began_s)
            assert (details["peer_tokens"] > 300) == (number in (5, 8, 9)), (number, details)
        assert took_s[1] < took_s[2] + 4.0, took_s
    await wait_settled(fleet.node_url(2))


async def test_without_redis_nodes_go_on(start: Start) -> None:
    """Redis killed: turns are answered, readiness stays and says what is wrong; Redis back, empty: caches travel."""
    fleet = await asyncio.to_thread(start, 2)
    async with aiohttp.ClientSession() as session:
        chat = Chat(session, opening(4, 250))
        await chat.ask(fleet.node_url(1))
        fleet.redis.kill()
        chat.say("Go on.")
        await chat.ask(fleet.node_url(1))
        async with asyncio.timeout(30):
            while True:
                async with session.get(f"{fleet.node_url(1)}/readyz") as reply:
                    said = await reply.json()
                    assert reply.status == 200
                if "degraded" in said:
                    break
                await asyncio.sleep(0.1)
        fleet.redis.start()
        await wait_known(fleet.node_url(2))
        chat.say("Go on.")
        details = await chat.ask(fleet.node_url(2))
        assert details["peer_tokens"] > 0


@pytest.mark.full
async def test_forty_sessions_round_robin(start: Start) -> None:
    """40 sessions of 10 turns through the balancer: tokens as on one node, the beginning reused by every later turn."""
    fleet = await asyncio.to_thread(start, 3, "--prefill", "exact", "--peer-patience", "5")
    fresh = await asyncio.to_thread(start, 1, "--prefill", "exact", "--cache-bytes", str(512 << 20))
    async with aiohttp.ClientSession() as session:

        async def talk(number: int, url: str, gate: asyncio.Semaphore) -> Chat:
            chat = Chat(session, opening(number, 140))
            for turn in range(10):
                async with gate:
                    await chat.ask(url, max_tokens=4)
                chat.say(f"And then, part {turn}?")
            return chat

        gate = asyncio.Semaphore(6)
        around = await asyncio.gather(*(talk(number, fleet.url, gate) for number in range(40)))
        alone = await asyncio.gather(*(talk(number, fresh.node_url(1), gate) for number in range(40)))
    assert [chat.replies for chat in around] == [chat.replies for chat in alone]
    later = add_up(around, first=False)
    shares = {name: round(count / sum(later.values()), 3) for name, count in later.items()}
    print("later turns by source:", shares)
    # A node that answers a conversation again finds most of it in its own memory.
    assert shares["computed_tokens"] < 0.15 and shares["peer_tokens"] > 0.05, shares
    assert all(details["cached_tokens"] for chat in around for details in chat.details[1:])
    for number in (1, 2, 3):
        await wait_settled(fleet.node_url(number))

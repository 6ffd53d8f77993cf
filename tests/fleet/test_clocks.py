"""Clocks on the wall of a fleet's nodes are five minutes apart, and jump: nothing in a fleet depends on them."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from dsuf.trial.fleet import TrialFleet
from tests.fleet.clocks import OFF_S, Clocks, find_compiler, read_off_s
from tests.fleet.conftest import skip_without_programs
from tests.fleet.rig import Chat, add_up, find_ports, opening, wait_settled, wait_told

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(400)]


async def test_clocks_that_are_off_and_jump_cost_nothing(tmp_path: Path) -> None:
    """Caches travel as ever, nobody's lease ends early, and nobody is taken for gone."""
    skip_without_programs()
    if find_compiler() is None:
        pytest.skip("no C compiler on this machine")
    clocks = Clocks(tmp_path, 3)
    clocks.build()
    for number, off_s in ((1, 0), (2, OFF_S), (3, -OFF_S)):
        clocks.set(number, off_s)
    flags = ("--prefill", "exact", "--cache-bytes", str(96 << 20), "--threads", "1")
    fleet = TrialFleet(3, tmp_path, port=find_ports(), flags=flags, own_environ=clocks.environ)
    try:
        await asyncio.to_thread(fleet.start)
        async with aiohttp.ClientSession() as session:
            seen = [round(await read_off_s(session, fleet.node_url(number)), -1) for number in (1, 2, 3)]
            assert seen == [0, OFF_S, -OFF_S], "the clocks are not off"
            around, alone = (Chat(session, opening(1, 200)) for _ in range(2))
            for turn in range(6):
                await around.ask(fleet.node_url(turn % 3 + 1))
                around.say(opening(10 + turn, 30))
                if turn == 2:  # all jump, each another way
                    for number, off_s in ((1, -OFF_S), (2, -OFF_S), (3, OFF_S)):
                        clocks.set(number, off_s)
                await wait_told(fleet.node_url(turn % 3 + 1), fleet.node_url((turn + 1) % 3 + 1))
            seen = [round(await read_off_s(session, fleet.node_url(number)), -1) for number in (1, 2, 3)]
            assert seen == [-OFF_S, -OFF_S, OFF_S], "the clocks have not jumped"
            later = add_up([around], first=False)
            assert all(details["peer_tokens"] for details in around.details[1:]), "a node did without the one before"
            assert around.recomputed_tokens < 0.05 * around.held_tokens, later
            for number in (1, 2, 3):
                facts = await wait_settled(fleet.node_url(number))
                assert facts["fleet"]["trouble"] is None and len(facts["fleet"]["members"]) == 2, facts
                async with session.post(f"{fleet.node_url(number)}/flush_cache") as reply:
                    assert reply.status == 200
            for turn in range(6):
                await alone.ask(fleet.node_url(1))
                alone.say(opening(10 + turn, 30))
            assert alone.replies == around.replies
    finally:
        for program in fleet.programs:
            program.kill()

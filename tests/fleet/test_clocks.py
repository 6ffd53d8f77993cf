"""Clocks on the wall of a fleet's nodes are five minutes apart, and jump: nothing in a fleet depends on them."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from dsuf.trial.fleet import TrialFleet
from tests.fleet.conftest import skip_without_programs
from tests.fleet.rig import Chat, add_up, find_ports, opening, wait_settled, wait_told

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(400)]
OFF_S = 300
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib", "/usr/local/lib")


def find_faketime() -> Path:
    """The library that lets a process see another time of day; skips where there is none."""
    for folder in LIBRARIES:
        if (path := Path(folder) / "faketime" / "libfaketimeMT.so.1").exists():
            return path
    pytest.skip("no libfaketime on this machine (Debian, Ubuntu: apt-get install libfaketime)")


class Clocks:
    """Times of day for the nodes of a fleet, which can be set while they run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._library = folder, find_faketime()

    def set(self, number: int, off_s: int) -> None:
        """Node `number` is `off_s` ahead from now on."""
        self._path(number).write_text(f"{off_s:+d}\n")

    def environ(self, number: int) -> Mapping[str, str]:
        """What node `number` has to find in its environment; clocks that only go forward are left alone."""
        return {
            "LD_PRELOAD": str(self._library), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_TIMESTAMP_FILE": str(self._path(number)),
        }  # fmt: skip

    def _path(self, number: int) -> Path:
        return self._folder / f"clock{number}"


async def read_off_s(session: aiohttp.ClientSession, url: str) -> float:
    """How far the node at `url` is ahead, by the time that it gives a reply."""
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        return float((await reply.json())["created"]) - time.time()


async def test_clocks_that_are_off_and_jump_cost_nothing(tmp_path: Path) -> None:
    """Caches travel as ever, nobody's lease ends early, and nobody is taken for gone."""
    skip_without_programs()
    clocks = Clocks(tmp_path)
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
                    await asyncio.sleep(1.2)  # how often clocks are read
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

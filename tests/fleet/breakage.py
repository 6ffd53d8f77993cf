"""A fleet of real processes in which something breaks while caches travel, and what has to hold all the same.

In each round conversations begin on one node, the victim, and go on elsewhere. As their caches leave the victim, in the
midst of the bytes, one thing breaks. Every reply must be that of a node alone, nobody may have asked peers for longer
than computing would have taken, and when all is whole again nothing may be held.
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dsuf.trial.fleet import TrialFleet
from tests.fleet.clocks import Clocks
from tests.fleet.faults import FAULTS, Fault
from tests.fleet.proxy import Proxy
from tests.fleet.rig import Chat, add_up, find_ports, opening, wait_settled

NODES = 3
PROXY_ABOVE = 300
"""How far a node's proxy is above its HTTP port."""
TALKS = 3
WORDS = 120
IN_MIDST_BYTES = 30_000
"""So much of a cache has left the victim when it happens; a cache of `WORDS` words is larger."""
SLACK_S = 1.5
"""By how much a process on a busy machine may notice late that a time is over."""
ASK_S = 90.0
FLAGS = (
    "--prefill", "exact", "--cache-bytes", str(96 << 20), "--threads", "1", "--log-level", "debug", "--drain-s", "20",
)  # fmt: skip
MOST_TASKS = MOST_FILES = 40
"""Of a node that does nothing; what each round left behind would show."""
Alone = Callable[[int], Awaitable[Sequence[str]]]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one fault: pulls by their result, prompt tokens of later turns by source, and all that was wrong.
    `overrun_s` is how much longer than computing would have taken the slowest asking of peers took."""

    fault: str
    number: int
    seconds: float
    pulls: Mapping[str, int]
    tokens: Mapping[str, int]
    overrun_s: float
    problems: Sequence[str]


class Breakage:
    """`NODES` nodes that reach each other through proxies. Use within `async with`."""

    def __init__(self, folder: Path, alone: Alone) -> None:
        port = find_ports()
        self.proxies = [
            Proxy(port + PROXY_ABOVE + number, port + 100 + number) for number in range(1, NODES + 1)
        ]  # fmt: skip
        clocks = Clocks(folder, NODES)
        clocks.build()
        self.fleet = TrialFleet(
            NODES, folder, port=port, flags=FLAGS, own_flags=self._advertise, own_environ=clocks.environ
        )  # fmt: skip
        self._alone = alone
        self._read: Counter[str] = Counter()

    async def __aenter__(self) -> "Breakage":
        """Start it all."""
        for proxy in self.proxies:
            await proxy.start()
        await asyncio.to_thread(self.fleet.start)
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it all."""
        await self.session.close()
        for program in self.fleet.programs:
            program.send(signal.SIGCONT)
        await asyncio.to_thread(self.fleet.stop, 20.0)
        for proxy in self.proxies:
            await proxy.close()

    async def run(self, fault: str, number: int) -> Round:
        """One round, whose conversations and victim depend on `number`."""
        began_s, victim = time.monotonic(), number % NODES + 1
        others = [other for other in range(1, NODES + 1) if other != victim]
        await self._begin()
        before = await self._count_pulls(others)
        chats = [Chat(self.session, opening(TALKS * number + i, WORDS)) for i in range(TALKS)]
        await asyncio.gather(*(chat.ask(self.fleet.node_url(victim)) for chat in chats))
        await self._wait_known(others, victim)
        problems: list[str] = []
        happen = FAULTS[fault](self.fleet, self.proxies[victim - 1], victim)
        self.proxies[victim - 1].arm(IN_MIDST_BYTES, happen.begin)
        await self._go_on(chats, [*others, victim], happen, problems)
        if self.proxies[victim - 1].armed:
            problems.append("nothing was pulled, so nothing broke")
        pulls = await self._count_pulls(others) - before
        if not pulls[happen.result] or (happen.result == "whole" and len(pulls) > 1):
            problems.append(f"pulls came to {dict(pulls)}, so it was another fault")
        await happen.end()
        problems += await self._check(chats, number)
        overrun_s = max(self._read_overruns(), default=0.0)
        if overrun_s > SLACK_S:
            problems.append(f"peers were asked for {overrun_s:.2f} s more than computing would have taken")
        return Round(
            fault=fault, number=number, seconds=round(time.monotonic() - began_s, 2), pulls=dict(pulls),
            tokens=add_up(chats, first=False), overrun_s=round(overrun_s, 3), problems=problems,
        )  # fmt: skip

    async def wait_whole(self, within_s: float = 90.0) -> None:
        """Wait until all nodes are ready, know each other, and leave nobody alone, which can take a minute."""
        async with asyncio.timeout(within_s):
            for number in range(1, NODES + 1):
                await asyncio.to_thread(self.fleet.wait_ready, number, within_s)
            while True:
                if all([self._is_whole(await self.facts(number)) for number in range(1, NODES + 1)]):
                    return
                await asyncio.sleep(0.1)

    async def facts(self, number: int) -> Mapping[str, Any]:
        """What node `number` tells of itself."""
        async with self.session.get(f"{self.fleet.node_url(number)}/server_info") as reply:
            facts: Mapping[str, Any] = (await reply.json())["node"]
            return facts

    def count_files(self, number: int) -> int:
        """Open files of node `number`."""
        return len(os.listdir(f"/proc/{self.fleet.nodes[number - 1].pid}/fd"))

    def _advertise(self, number: int) -> Sequence[str]:
        return ("--advertise", f"127.0.0.1:{self.proxies[number - 1].port}")

    async def _begin(self) -> None:
        """Nothing is kept, nothing is wrong."""
        await self.wait_whole()
        for number in range(1, NODES + 1):
            async with self.session.post(f"{self.fleet.node_url(number)}/flush_cache") as reply:
                assert reply.status == 200, await reply.text()
        async with asyncio.timeout(10):
            while True:
                if not any([(await self.facts(n))["fleet"]["directory"]["entries"] for n in range(1, NODES + 1)]):
                    return
                await asyncio.sleep(0.05)

    async def _wait_known(self, others: Sequence[int], victim: int) -> None:
        """Wait until all of what the victim keeps was told to the others."""
        async with asyncio.timeout(15):
            while True:
                directory = (await self.facts(victim))["fleet"]["directory"]
                heard = [(await self.facts(other))["fleet"]["directory"]["entries"] for other in others]
                if directory["own"] and not directory["unsent"] and set(heard) == {directory["own"]}:
                    return
                await asyncio.sleep(0.05)

    async def _go_on(
        self, chats: Sequence[Chat], nodes: Sequence[int], happen: Fault, problems: list[str]
    ) -> None:  # fmt: skip
        """Two more turns of each conversation, each on another node than before, the victim where it can answer."""
        for turn in range(2):
            for chat in chats:
                chat.say(f"Go on, part {turn}.")
            places = [nodes[(i + turn) % NODES] for i in range(len(chats))]
            asked = {chat: asyncio.ensure_future(self._ask(chat, places[i], happen)) for i, chat in enumerate(chats)}
            free = [asked[chat] for i, chat in enumerate(chats) if places[i] != happen.victim]
            await asyncio.gather(*free)
            problems += await happen.amid()
            await asyncio.gather(*asked.values())

    async def _ask(self, chat: Chat, place: int, happen: Fault) -> None:
        """One turn on node `place`; on another where that one breaks off or is gone, as a balancer has it."""
        places = [place, *(n for n in range(1, NODES + 1) if n not in (place, happen.victim))]
        for number in places[1:] if happen.gone and place == happen.victim else places:
            try:
                await chat.ask(self.fleet.node_url(number))
                return
            except aiohttp.ClientError:
                if number != happen.victim:
                    raise
        raise AssertionError("no node answers")

    async def _check(self, chats: Sequence[Chat], number: int) -> list[str]:
        """What is not as it should be, once everything is whole again."""
        problems = []
        for i, chat in enumerate(chats):
            if (alone := await self._alone(TALKS * number + i)) != chat.replies:
                problems.append(f"replies {chat.replies}, of one node {alone}")
        try:
            await self.wait_whole()
            for node in range(1, NODES + 1):
                await wait_settled(self.fleet.node_url(node))
        except TimeoutError:
            problems += [f"held or not whole: {await self.facts(node)}" for node in range(1, NODES + 1)]
        for node in range(1, NODES + 1):
            facts = await self.facts(node)
            if facts["tasks"] > MOST_TASKS or self.count_files(node) > MOST_FILES:
                problems.append(f"node {node}: {facts['tasks']} tasks, {self.count_files(node)} files")
        return problems

    def _is_whole(self, facts: Mapping[str, Any]) -> bool:
        fleet = facts["fleet"]
        return fleet["trouble"] is None and len(fleet["members"]) == NODES - 1 and not fleet["peers"]["suspects"]

    async def _count_pulls(self, nodes: Sequence[int]) -> Counter[str]:
        """Pulls of `nodes`, by their result, and damaged caches."""
        found: Counter[str] = Counter()
        for number in nodes:
            async with self.session.get(f"{self.fleet.node_url(number)}/metrics") as reply:
                for line in (await reply.text()).splitlines():
                    if line.startswith("dsuf_peer_pulls_total"):
                        found[line.split('"')[1]] += int(float(line.split()[-1]))
        return found

    def _read_overruns(self) -> list[float]:
        """By how much asking peers took longer than computing would have, from what the logs tell since last time."""
        found = []
        for node in self.fleet.nodes:
            with node.log.open() as log:
                log.seek(self._read[node.name])
                lines = log.readlines()
                self._read[node.name] = log.tell()
            told = [json.loads(line) for line in lines if '"prompt asked of peers"' in line and line.endswith("\n")]
            found += [line["seconds"] - line["budget_s"] for line in told]
        return found

"""Two nodes compute prompts, two others answer: tokens as from one node, pulls beside later chunks, who dies where."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest
import pytest_asyncio

from dsuf.trial.fleet import TrialFleet
from dsuf.trial.program import Program
from tests.fleet.conftest import skip_without_programs
from tests.fleet.proxy import Proxy
from tests.fleet.rig import Chat, add_up, find_ports, opening, wait_settled

pytestmark = [
    pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip
PREFILL, DECODE = (1, 2), (3, 4)
SESSIONS = 20
WORDS = 160
FLAGS = ("--prefill", "exact", "--prefill-chunk-tokens", "128", "--cache-bytes", str(96 << 20), "--threads", "1")
STAGES = {"first answer": 1, "first pages": 20_000, "last pages": 60_000}
"""What has left the node that computes when somebody is killed, in bytes."""


class Apart:
    """Four nodes, the first two for prompts and behind proxies, and one node alone."""

    def __init__(self, fleet: TrialFleet, alone: TrialFleet, proxies: Sequence[Proxy]) -> None:
        self.fleet, self.alone, self.proxies = fleet, alone, proxies

    async def check(self, chats: Sequence[Chat], numbers: Sequence[int]) -> None:
        """The replies are those of the node alone."""
        for chat, number in zip(chats, numbers, strict=True):
            other = Chat(chat.session, opening(number, WORDS))
            await other.ask(self.alone.node_url(1))
            assert other.replies == chat.replies[:1], number

    async def wait_whole(self) -> None:
        """Wait until all nodes are ready and know each other, and nothing is held."""
        for number in (*PREFILL, *DECODE):
            await asyncio.to_thread(self.fleet.wait_ready, number)
        async with asyncio.timeout(60):
            for number in (*PREFILL, *DECODE):
                while True:
                    facts = await wait_settled(self.fleet.node_url(number))
                    if len(facts["fleet"]["members"]) == 3 and not facts["fleet"]["peers"]["suspects"]:
                        break
                    await asyncio.sleep(0.1)

    def read_log(self, number: int, event: str) -> list[dict[str, str]]:
        """What node `number` told of `event`."""
        lines = self.fleet.nodes[number - 1].log.read_text().splitlines()
        return [json.loads(line) for line in lines if f'"event":"{event}"' in line]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Apart]:
    """All of it, ended whatever happens."""
    skip_without_programs()
    port, folder = find_ports(), tmp_path_factory.mktemp("apart")
    proxies = [Proxy(port + 300 + number, port + 100 + number) for number in PREFILL]
    fleet = TrialFleet(
        4, folder, port=port, prefill=2, flags=(*FLAGS, "--log-level", "debug"),
        own_flags=lambda n: ("--advertise", f"127.0.0.1:{proxies[n - 1].port}") if n in PREFILL else (),
    )  # fmt: skip
    try:
        for proxy in proxies:
            await proxy.start()
        await asyncio.to_thread(fleet.start)
        alone = TrialFleet(1, tmp_path_factory.mktemp("alone"), port=find_ports(), flags=FLAGS)
        await asyncio.to_thread(alone.start)
        yield Apart(fleet, alone, proxies)
    finally:
        for program in (*fleet.programs, *alone.programs):
            program.kill()
        for proxy in proxies:
            await proxy.close()


async def test_twenty_sessions(apart: Apart) -> None:
    """The first turns' prompts come from nodes that compute them, from both; later turns add what is new."""
    async with aiohttp.ClientSession() as session:
        chats = [Chat(session, opening(number, WORDS)) for number in range(SESSIONS)]
        gate = asyncio.Semaphore(8)

        async def talk(chat: Chat) -> None:
            async with gate:
                await chat.ask(apart.fleet.url)

        await asyncio.gather(*(talk(chat) for chat in chats))
        first = add_up(chats, first=True)
        assert first["peer_tokens"] > 0.8 * sum(first.values()), first
        await apart.check(chats, range(SESSIONS))
    ends = {number: apart.read_log(number, "turn ended") for number in PREFILL}
    assert min(map(len, ends.values())) >= SESSIONS // 4, "one node computed them all"
    await apart.wait_whole()
    early = count_early_parts(apart)
    print(f"{early} of {SESSIONS} prompts had parts taken before they were computed; sources: {first}")
    assert early >= SESSIONS // 5


def count_early_parts(apart: Apart) -> int:
    """Prompts of which something was on the node that answers before the other had computed the rest."""
    computed = {e["turn"].rpartition("/")[2]: e["time"] for n in PREFILL for e in apart.read_log(n, "turn ended")}
    taken: dict[str, str] = {}
    for number in DECODE:
        for event in apart.read_log(number, "part taken"):
            taken.setdefault(event["turn"], event["time"])
    return sum(taken[turn] < computed[turn] for turn in taken.keys() & computed.keys())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_a_node_dies(apart: Apart, who: str, stage: str) -> None:
    """Whoever dies, at whatever stage: the turn is answered, by another node where the one that was asked is gone."""
    number = SESSIONS + len(STAGES) * (who == "decode") + list(STAGES).index(stage)
    await apart.wait_whole()
    nodes, asked = apart.fleet.nodes, DECODE[number % 2]
    killed: list[Program] = []

    def kill(program: Program) -> None:
        program.send(signal.SIGKILL)
        killed.append(program)

    for prefill, proxy in zip(PREFILL, apart.proxies, strict=True):
        victim = nodes[prefill - 1] if who == "prefill" else nodes[asked - 1]
        proxy.arm(STAGES[stage], lambda victim=victim: killed or kill(victim))
    async with aiohttp.ClientSession() as session:
        chat = Chat(session, opening(number, WORDS))
        try:
            await chat.ask(apart.fleet.node_url(asked))
        except aiohttp.ClientError:
            assert who == "decode"
            await chat.ask(apart.fleet.node_url(next(other for other in DECODE if other != asked)))
        assert len(killed) == 1, "nobody was killed"
        for proxy in apart.proxies:
            proxy.heal()
        await apart.check([chat], [number])
    await asyncio.to_thread(killed[0].wait, 10.0)
    await asyncio.to_thread(killed[0].start)
    await apart.wait_whole()

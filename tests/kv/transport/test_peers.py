"""All peers of a node: one connection to each process of the fleet, and what was learnt of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dsuf.kv.directory.contract import Member
from dsuf.kv.pulls import Speed
from dsuf.kv.transport.peer import PeerGiver, Ways
from dsuf.kv.transport.peers import FleetPeers
from dsuf.kv.transport.server import PeerServer
from tests.kv.rig import ids
from tests.kv.test_handoff import Pair, until
from tests.kv.transport.rig import FAR, NEAR, SECRET, TERMS, Remote, count_sockets
from tests.toy import make_turn


class Known:
    """A far node that serves, and the peers of a near one."""

    def __init__(self) -> None:
        self.pair = Pair(deadline_s=5.0)
        near, far = self.pair.near, self.pair.far
        self.server = PeerServer(FAR, self.pair.giver, TERMS, SECRET, on_sent=far.metrics.fleet.count_served)
        self.peers = FleetPeers(NEAR, near.sessions, near.metrics, TERMS, SECRET)

    def member(self, boot: str = FAR.boot) -> Member:
        """The far node."""
        return Member(node=FAR.node, boot=boot, host="127.0.0.1", port=self.port)

    async def listen(self) -> None:
        """Let peers in."""
        self.port = await self.server.listen("127.0.0.1", 0)


@asynccontextmanager
async def knowing() -> AsyncIterator[Known]:
    """Both, and nothing left of them afterwards."""
    sockets, known = count_sockets(), Known()
    await known.listen()
    yield known
    await known.peers.close()
    await known.server.close()
    await known.pair.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await until(lambda: count_sockets() <= sockets)


def read_metric(text: bytes, name: str) -> float:
    """A sample."""
    return next(float(line.split()[-1]) for line in text.decode().splitlines() if line.startswith(name))


async def test_a_prompt_comes_and_its_bytes_are_counted_on_both_sides() -> None:
    async with knowing() as known:
        await known.pair.far.run(make_turn("a", ids(60)))
        taker = known.peers.taker(known.member())
        assert taker is not None
        assert await taker.take(make_turn("t", ids(60, [1, 2])), compute=False) == 0
        assert known.peers.counters() == {"tcp": 1, "rdma": 0, "suspects": 0}
        near, far = (rig.metrics.render() for rig in (known.pair.near, known.pair.far))
        pulled = read_metric(near, "dsuf_peer_pulled_bytes_total")
        assert pulled == read_metric(far, "dsuf_peer_served_bytes_total") == known.server.served_bytes
        layout = known.pair.near.engine.layout
        assert 7 * layout.page_bytes < pulled < 10 * layout.page_bytes + layout.state_bytes
        assert read_metric(near, 'dsuf_peer_pulls_total{result="whole"}') == 1
        assert read_metric(near, "dsuf_peer_pulled_tokens_total") == 60


async def test_a_process_is_one_peer_and_its_successor_another() -> None:
    async with knowing() as known:
        first = known.peers.taker(known.member())
        assert known.peers.taker(known.member()) is first
        assert known.peers.taker(known.member("boot 3")) is not first
        known.peers.learn(known.member(), 10_000_000, 1.0)
        assert known.peers.speed(known.member()) != Speed()
        assert known.peers.speed(known.member("boot 3")) == Speed()


async def test_a_successor_that_the_directory_does_not_know_yet_is_not_taken_for_it() -> None:
    """What was promised by a process is not asked of the one that took its place."""
    async with knowing() as known:
        await known.pair.far.run(make_turn("a", ids(60)))
        taker = known.peers.taker(known.member("boot 0"))
        assert taker is not None
        assert await taker.take(make_turn("t", ids(60, [1, 2])), compute=False) is None
        assert known.peers.taker(known.member("boot 0")) is None, "it is left alone"
        assert known.peers.counters() == {"tcp": 0, "rdma": 0, "suspects": 1}
        assert not known.pair.giver.calls


async def test_members_that_are_gone_are_parted_from() -> None:
    async with knowing() as known:
        taker = known.peers.taker(known.member())
        assert taker is not None
        await taker.take(make_turn("t", ids(60)), compute=False)
        assert known.server.counters()["peers"] == 1
        known.peers.keep([known.member()])
        assert known.peers.counters()["tcp"] == 1
        known.peers.keep([known.member("boot 3")])
        assert known.peers.counters()["tcp"] == 0
        await until(lambda: known.server.counters()["peers"] == 0)
        assert known.peers.taker(known.member()) is not taker


async def test_who_gave_up_while_it_connected_asks_for_nothing() -> None:
    """A peer stands still as it is dialled, and goes on when nobody wants the prompt any more: it lends nothing."""
    async with Remote(deadline_s=5.0) as remote:
        await remote.far.run(make_turn("a", ids(60)))
        dial, dialled = remote.peer._dial, asyncio.Event()

        async def dial_late(peer: PeerGiver) -> Ways:
            await dialled.wait()
            return await dial(peer)

        remote.peer._dial = dial_late
        turn = make_turn("t", ids(60, [1, 2]))
        assert await remote.taker.take(turn, compute=False, budget_s=0.02) is None
        dialled.set()
        await until(lambda: remote.peer.is_connected)
        await asyncio.sleep(0.1)
        assert remote.server.counters()["turns"] == remote.server.counters()["offers"] == 0
        assert not remote.giver.calls["offer"]


async def test_a_peer_can_be_told_to_fetch() -> None:
    async with knowing() as known:
        assert await known.peers.giver(known.member()).invite(make_turn("t", ids(20))) is False

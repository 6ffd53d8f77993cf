"""Caches by RDMA between whole nodes: control over real connections on loopback, bytes over a device with faults."""

import asyncio
import contextlib
import os
from typing import Any

import pytest

from dsuf.errors import PeerError, PeerLost
from dsuf.kv.sessions import Restored
from dsuf.kv.taker import Taker
from dsuf.kv.transport.adapter import Adapter
from dsuf.kv.transport.fallback import FallbackMover
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.queue_pair import Read
from dsuf.kv.transport.rdma import Pace, RdmaFabric
from dsuf.kv.transport.server import PeerServer
from dsuf.kv.transport.streams import Address
from dsuf.types import Turn
from tests.kv.rig import Rig, ids
from tests.kv.test_handoff import MODES, Pair, until
from tests.kv.test_mobility import resume_here
from tests.rdma.fake import NEVER, FakeDevice, Wire
from tests.rdma.rig import OFFER
from tests.toy import make_turn

SECRET = Credentials(b"a secret of the fleet")
NEAR, FAR = NodeName("near", "boot 1"), NodeName("far", "boot 2")
PACE = Pace(stall_s=0.3, flush_s=0.1)


class Nodes(Pair):
    """Two nodes, both with RDMA unless `fabrics` says otherwise. Use within `async with`: nothing may be left."""

    def __init__(self, *, fabrics: str = "near far", **pair: Any) -> None:
        super().__init__(**pair)
        self.wire, self._with = Wire(), fabrics
        self.near_gid = FakeDevice(self.wire, "10.0.0.1").gid

    def make_fabric(self, name: str, address: str, rig: Rig) -> RdmaFabric | None:
        if name not in self._with:
            return None
        blocks = rig.arena.blocks
        return RdmaFabric(Adapter(FakeDevice(self.wire, address), blocks.memory, blocks.block_bytes), PACE)

    async def __aenter__(self) -> "Nodes":
        self.files = len(os.listdir("/proc/self/fd"))
        near, far = self.make_fabric("near", "10.0.0.1", self.near), self.make_fabric("far", "10.0.0.2", self.far)
        self.fabrics = [fabric for fabric in (near, far) if fabric is not None]
        ours, theirs = (Terms("toy", b"" if fabric is None else fabric.describe()) for fabric in (near, far))
        self.server = PeerServer(FAR, self.giver, theirs, SECRET, fabric=far)
        port = await self.server.listen("127.0.0.1", 0)
        self.peer = PeerGiver(FAR, over_tcp(Address(NEAR, FAR, "127.0.0.1", port, ours, SECRET, 5.0), near))
        self.taker = Taker(self.near.sessions, self.peer, self.near.metrics, deadline_s=2)
        return self

    async def __aexit__(self, kind: Any, *_: object) -> None:
        while self.taker._leaving:
            await asyncio.wait(self.taker._leaving)
        await self.peer.close()
        await self.server.close()
        await asyncio.sleep(0.01)
        assert not self.wire.pairs
        for fabric in self.fabrics:
            fabric.close()
        if kind is None:
            assert not self.wire.regions
            await self.close()
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
            await until(lambda: len(os.listdir("/proc/self/fd")) <= self.files)

    async def miss(self, turn: Turn) -> None:
        """`turn` goes on with the right tokens, and with nothing from the peer."""
        restored = await resume_here(self, turn)
        assert restored.peer_tokens == 0


async def keep(nodes: Nodes, length: int = 60) -> Turn:
    """A conversation on the far node; its next turn."""
    done = await nodes.far.run(make_turn("a", ids(length, [3])))
    return make_turn("b", (*done.conversation, 7, 8))


async def prove(nodes: Nodes) -> None:
    """Something else comes over first, so that RDMA is known to work."""
    await nodes.far.run(make_turn("proof", ids(30, [9])))
    assert (await resume_here(nodes, make_turn("proof", ids(30, [9])))).peer_tokens > 0


@MODES
async def test_the_next_turn_goes_on_elsewhere(replay: int) -> None:
    """No byte of a cache goes over the connections."""
    async with Nodes(replay_tokens=replay) as nodes:
        turn = await keep(nodes)
        kept = len(turn.prompt.ids) - 3
        assert await resume_here(nodes, turn) == Restored(start=kept, peer_tokens=kept)
        assert nodes.peer.pulled_bytes == sum(read.size_bytes for read in nodes.wire.reads) > 0
        assert nodes.server.served_bytes == 0


@MODES
async def test_prompts_are_taken_while_they_are_computed(replay: int) -> None:
    async with Nodes(replay_tokens=replay) as nodes:
        restored, _ = await nodes.run(make_turn("a", ids(100, [3])))
        assert restored == Restored(start=100, peer_tokens=100)
        assert nodes.wire.reads and nodes.server.served_bytes == 0


@pytest.mark.parametrize("fabrics", ["near", "far", ""])
async def test_bytes_go_over_tcp_where_one_has_no_device(fabrics: str) -> None:
    async with Nodes(fabrics=fabrics) as nodes:
        turn = await keep(nodes)
        kept = len(turn.prompt.ids) - 3
        assert await resume_here(nodes, turn) == Restored(start=kept, peer_tokens=kept)
        assert nodes.server.served_bytes > 0 and not nodes.wire.reads


@pytest.mark.parametrize("status", ["REM_ACCESS_ERR", "RETRY_EXC_ERR", "never"])
async def test_a_pull_that_fails_is_a_miss(status: str) -> None:
    """And the one after it comes over, by RDMA again, as it has done before."""
    async with Nodes() as nodes:
        turn = await keep(nodes)
        await prove(nodes)
        nodes.wire.fault = lambda read: NEVER if status == "never" else status
        await nodes.miss(turn)
        nodes.wire.fault = lambda read: 0.0
        nodes.near.sessions.flush()
        nodes.taker._avoid_until_s = 0.0
        assert (await resume_here(nodes, turn)).peer_tokens > 0
        assert nodes.server.served_bytes == 0


@pytest.mark.parametrize("status", ["RETRY_EXC_ERR", "never"])
async def test_where_devices_have_no_way_to_each_other_bytes_go_over_tcp(status: str) -> None:
    """The pull that finds out loses nothing but time, and there is no second one like it."""
    async with Nodes() as nodes:
        turn = await keep(nodes)
        nodes.wire.fault = lambda read: NEVER if status == "never" else status
        assert (await resume_here(nodes, turn)).peer_tokens > 0
        tried = len(nodes.wire.reads)
        nodes.near.sessions.flush()
        assert (await resume_here(nodes, turn)).peer_tokens > 0
        assert len(nodes.wire.reads) == tried and nodes.server.served_bytes > 0


async def test_a_flipped_bit_is_a_miss_and_counted() -> None:
    async with Nodes() as nodes:
        turn = await keep(nodes)
        memory = nodes.far.arena.blocks.memory

        def flip(read: Read) -> float:
            at = read.remote - nodes.fabrics[1]._adapter.region.address
            memory[at + 5] ^= 4
            return 0.0

        nodes.wire.fault = flip
        await nodes.miss(turn)
        assert nodes.near.count("checksum_failures_total") == 1


async def test_a_lease_that_runs_out_is_fenced_before_its_blocks_serve_others() -> None:
    """The reader stops first. Should it not, its pair is gone, and it reads nothing of what comes into the blocks."""
    async with Nodes(lease_s=0.25) as nodes:
        turn = await keep(nodes)
        nodes.wire.fault = lambda read: NEVER
        taking = asyncio.create_task(nodes.taker.take(turn, compute=False))
        await until(lambda: bool(nodes.wire.reads))
        assert len(nodes.wire.pairs) == 2
        await until(lambda: not nodes.giver._lent, 20)
        assert all(key[0] == nodes.near_gid for key in nodes.wire.pairs)
        assert await taking is None
        assert nodes.near.arena.counters()["filling"] == 0


async def test_a_control_connection_that_is_lost_ends_what_is_under_way() -> None:
    async with Nodes() as nodes:
        turn = await keep(nodes)
        nodes.wire.fault = lambda read: NEVER
        taking = asyncio.create_task(nodes.taker.take(turn, compute=False))
        await until(lambda: bool(nodes.wire.reads))
        assert nodes.peer._line is not None
        nodes.peer._line.link.end("cut")
        assert await taking is None
        await until(lambda: not nodes.wire.pairs)
        await until(lambda: not nodes.giver._lent)


async def test_a_turn_that_leaves_gives_its_blocks_back_after_the_last_write() -> None:
    """The device writes on until it has flushed, and the pair is gone by then."""
    async with Nodes() as nodes:
        turn = await keep(nodes)
        nodes.wire.fault, nodes.wire.flush_s = lambda read: NEVER, 0.05
        taking = asyncio.create_task(nodes.taker.take(turn, compute=False))
        await until(lambda: bool(nodes.wire.reads))
        [filling] = nodes.near.arena._fillings
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await until(lambda: not nodes.near.arena.counters()["filling"])
        assert not any(key[0] == nodes.near_gid for key in nodes.wire.pairs)
        written = nodes.near.arena.blocks.view(filling.blocks[0])
        assert bytes(written[:8]) == b"\xee" * 8, "the last write came before"


class Way:
    """A mover of which each read ends as `plan` says."""

    def __init__(self, *plan: BaseException | None) -> None:
        self.plan, self.reads, self.closed = list(plan), 0, False

    async def read(self, offer: Any, pieces: Any, into: Any) -> None:
        self.reads += 1
        error = self.plan.pop(0) if self.plan else None
        if error is not None:
            raise error

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("plan", "first", "second"),
    [
        ([], 6, 0),
        ([PeerError("no")], 1, 6),
        ([None, PeerError("no"), PeerLost("no")], 6, 0),
        ([asyncio.CancelledError(), None], 6, 0),
        ([asyncio.CancelledError()] * 3, 3, 3),
        ([TimeoutError(), asyncio.CancelledError(), PeerError("no")], 3, 4),
    ],
)
async def test_when_the_other_way_is_taken(plan: list[BaseException | None], first: int, second: int) -> None:
    ways = Way(*plan), Way()
    mover = FallbackMover(*ways)
    for _ in range(6):
        with contextlib.suppress(PeerError, TimeoutError, asyncio.CancelledError):
            await mover.read(OFFER, [], [])
    assert (ways[0].reads, ways[1].reads) == (first, second)
    mover.close()
    assert ways[0].closed and ways[1].closed

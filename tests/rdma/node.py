"""Nodes in the test machines: a small engine with pages as large as real ones, sessions, a scheduler, and the ways to
peers; alone with one peer, or as a member of a fleet."""

import asyncio
import os
import secrets
import sys
import types
from pathlib import Path

import msgspec

import dsuf
from dsuf.config import Settings
from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.kv.transport.adapter import open_adapter
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.rdma import Pace, RdmaFabric
from dsuf.kv.transport.streams import Address
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Turn
from tests.toy import ToyEngine

if "DSUF_NODE" in os.environ:
    # A test machine has no more than the caches need: the rest of this package could not be imported there.
    sys.modules["dsuf.node"] = types.ModuleType("dsuf.node")
    sys.modules["dsuf.node"].__path__ = [str(Path(dsuf.__file__).parent / "node")]
from dsuf.node.fleet import open_fleet

PEER_PORT, REDIS_PORT = 7100, 7379
PAGE_BYTES = 64 << 10
BLOCKS = 160
DEADLINE_S = 12.0
SECRET = Credentials(b"a secret of the fleet")
KEEPER = "keeper"
PACE = Pace(chunk_bytes=256 << 10, reads=4, stall_s=4.0, flush_s=2.0)


class LargeEngine(ToyEngine):
    """A small engine whose pages are as large as real ones: what it does not use of them travels too."""

    def __init__(self) -> None:
        super().__init__(pages=BLOCKS, max_turns=4)
        self.layout = msgspec.structs.replace(self.layout, page_bytes=PAGE_BYTES)
        self.memory = bytearray(os.urandom(1 << 16) * BLOCKS)


class Moving(Taker):
    """Takes what a peer keeps; has prompts computed there only if `computes`."""

    computes = False

    async def take(self, turn: Turn, compute: bool = False) -> int | None:
        return await super().take(turn, self.computes)


class Node:
    """Engine, sessions and scheduler with an arena that RDMA knows, unless `rdma` is false. With `take_from` prompts
    are taken from that peer first."""

    def __init__(self, *, rdma: bool = True) -> None:
        self.engine, self.metrics = LargeEngine(), Metrics("test")
        self.arena = Arena(Blocks(PAGE_BYTES, map_memory(PAGE_BYTES * BLOCKS)))
        self.fabric: RdmaFabric | None = None
        if rdma:
            adapter = open_adapter(self.arena.blocks.memory, PAGE_BYTES, os.environ["DSUF_ADDRESS"], wanted="rdma")
            assert adapter is not None
            self.fabric = RdmaFabric(adapter, PACE)
        self.sessions = Sessions(self.engine, self.arena, self.metrics)
        self.terms = Terms(self.engine.layout.fingerprint, b"" if self.fabric is None else self.fabric.describe())
        self.peer: PeerGiver | None = None
        self.taker: Moving | None = None

    def take_from(self, host: str, boot: str, terms: Terms | None = None, *, compute: bool = False) -> None:
        """Ask the keeper there, in that life of its."""
        me = NodeName("reader", secrets.token_hex(8))
        address = Address(me, NodeName(KEEPER, boot), host, PEER_PORT, terms or self.terms, SECRET)
        self.peer = PeerGiver(address.other, over_tcp(address, self.fabric))
        self.taker = Moving(self.sessions, self.peer, self.metrics, deadline_s=DEADLINE_S)
        self.taker.computes = compute

    def start(self) -> None:
        """Let turns run."""
        self.scheduler = Scheduler(self.engine, Limits(), self.metrics, self.sessions, self.taker)
        self.loop = asyncio.create_task(self.scheduler.run())

    async def run(self, turn: Turn) -> tuple[list[int], int]:
        """Its tokens, and how many of its prompt came from the peer."""
        ticket = self.scheduler.submit(turn)
        try:
            tokens = [token async for result in ticket for token in result.ids]
        finally:
            ticket.cancel()
        await self.rest()
        return tokens, ticket.usage.peer_tokens

    async def rest(self) -> None:
        """Wait until nothing is on its way; fails where something is left."""
        async with asyncio.timeout(30):
            while any(self.scheduler.counters().values()) or self.in_use():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert self.engine.violations == []

    def in_use(self) -> dict[str, int]:
        """What is not zero, but should be when idle."""
        counters = dict(self.sessions.counters())
        names = ("turns", "copies", "pages_held", "leases", "filling", "dying")
        leaving = len(self.taker._leaving) if self.taker is not None else 0
        return {name: value for name, value in [*((n, counters[n]) for n in names), ("leaving", leaving)] if value}

    async def close(self) -> None:
        """Everything comes back."""
        if self.peer is not None:
            await self.peer.close()
        self.loop.cancel()
        await asyncio.gather(self.loop, return_exceptions=True)
        await self.sessions.close()
        pairs = 0 if self.fabric is None else len(self.fabric._adapter)
        if self.fabric is not None:
            self.fabric.close()
        assert self.arena.blocks.free == self.arena.blocks.count and not pairs, (self.arena.blocks.free, pairs)


class FleetMember(Node):
    """A node whose directory is in Redis at `redis`, as a member of the fleet called `name`."""

    def __init__(self, name: str, redis: str) -> None:
        super().__init__(rdma=False)
        self.engine.step_s = lambda plan: 0.008 * sum(part.stop - part.start for part in plan.prefill)
        self.settings = Settings(
            node_id=name, control_host=os.environ["DSUF_ADDRESS"], control_port=0, peer_secret="a secret of the fleet",
            redis_url=f"redis://{redis}:{REDIS_PORT}/0", transport="rdma",
        )  # fmt: skip

    async def join(self) -> None:
        """Be one."""
        self.fleet = await open_fleet(self.settings, self.sessions, self.metrics)
        self.scheduler = Scheduler(self.engine, Limits(), self.metrics, self.sessions, self.fleet.puller)
        self.loop = asyncio.create_task(self.scheduler.run())
        await self.fleet.join(self.scheduler)

    async def close(self) -> None:
        """Be one no more."""
        await self.fleet.leave(1.0)
        await self.fleet.close()
        await super().close()

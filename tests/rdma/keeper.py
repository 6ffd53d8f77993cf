"""A whole node in a test machine: it runs turns, keeps their caches, and lets a peer have them by RDMA.

python3 -m tests.rdma.keeper     # starts its process, again whenever it is killed, until the file `done` appears
"""

import asyncio
import os
import secrets
import signal
from typing import Any

import msgspec

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.giver import LocalGiver
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.kv.transport.adapter import open_adapter
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.rdma import Pace, RdmaFabric
from dsuf.kv.transport.server import PeerServer
from dsuf.kv.transport.streams import Address
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Turn
from tests.rdma.owner import freeze, run
from tests.toy import ToyEngine, make_turn

PORT, PEER_PORT = 7078, 7100
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


class Keeper:
    """The node that keeps, as the cases ask for it."""

    async def begin(self, lease_s: float = 30.0, rdma: bool = True) -> str:
        """Serve peers; its boot."""
        self.node, boot = Node(rdma=rdma), secrets.token_hex(8)
        self.node.start()
        self.giver = LocalGiver(self.node.sessions, self.node.scheduler.prepare, lease_s=lease_s)
        name = NodeName(KEEPER, boot)
        self.server = PeerServer(name, self.giver, self.node.terms, SECRET, fabric=self.node.fabric)
        await self.server.listen(os.environ["DSUF_ADDRESS"], PEER_PORT)
        return boot

    async def keep(self, ids: list[int]) -> list[int]:
        """Run a turn; the conversation of which the cache is kept now."""
        tokens, _ = await self.node.run(make_turn("first", ids))
        return [*ids, *tokens]

    def flip(self) -> None:
        """One bit in the middle of what is kept."""
        blocks = self.node.arena.blocks
        used = [block for block in range(blocks.count) if blocks._used[block]]
        blocks.view(used[len(used) // 2])[PAGE_BYTES // 2] ^= 1

    def reuse(self) -> int:
        """Withdraw everything, and let something else come into all blocks that are free; how many are."""
        blocks = self.node.arena.blocks
        self.node.sessions.flush()
        free = blocks.take(blocks.free)
        for block in free:
            blocks.view(block)[:] = b"\x66" * PAGE_BYTES
        blocks.give(free)
        return len(free)

    def served(self) -> int:
        """Bytes that went over TCP."""
        return self.server.served_bytes

    def held(self) -> dict[str, int]:
        """What peers hold here, and what is in use: nothing when all have left."""
        pairs = 0 if self.node.fabric is None else len(self.node.fabric._adapter)
        return {**self.server.counters(), **self.node.in_use(), "pairs": pairs, "lent": len(self.giver._lent)}

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self, seconds: float) -> None:
        freeze(seconds)

    async def close(self) -> None:
        if hasattr(self, "server"):
            await self.server.close()
            await self.node.rest()
            await self.node.close()


def make() -> Any:
    """One for each connection; it listens where the one before has closed."""
    return Keeper()


if __name__ == "__main__":
    run("tests.rdma.keeper", make, PORT)

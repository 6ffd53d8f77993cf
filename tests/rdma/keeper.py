"""A whole node in a test machine: it runs turns, keeps their caches, and lets a peer have them by RDMA.

python3 -m tests.rdma.keeper     # starts its process, again whenever it is killed, until the file `done` appears
"""

import asyncio
import os
import secrets
import signal
from typing import Any

from dsuf.kv.giver import LocalGiver
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.server import PeerServer
from tests.rdma.node import KEEPER, PAGE_BYTES, PEER_PORT, REDIS_PORT, SECRET, FleetMember, Node
from tests.rdma.owner import freeze, run
from tests.toy import make_turn

PORT = 7078


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

    async def begin_fleet(self) -> None:
        """Be a member of a fleet, whose Redis is here too."""
        address = os.environ["DSUF_ADDRESS"]
        words = f"redis-server --bind {address} --port {REDIS_PORT} --protected-mode no --appendonly no"
        self.redis = await asyncio.create_subprocess_exec(
            *words.split(), "--save", "", stdout=asyncio.subprocess.DEVNULL
        )
        self.node = member = FleetMember("first", address)
        await member.join()

    def fleet(self) -> dict[str, Any]:
        """What the node says of its fleet."""
        assert isinstance(self.node, FleetMember)
        return {name: self.node.fleet.facts()[name] for name in ("transport", "guests", "directory")}

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
        if hasattr(self, "node"):
            await self.node.rest()
            await self.node.close()
        if hasattr(self, "redis"):
            self.redis.kill()
            await self.redis.wait()


def make() -> Any:
    """One for each connection; it listens where the one before has closed."""
    return Keeper()


if __name__ == "__main__":
    run("tests.rdma.keeper", make, PORT)

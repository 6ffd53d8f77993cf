"""Two nodes over the toy engine, of which one takes from the other over real connections on loopback."""

import asyncio
import os
from typing import Any

from dsuf.kv.taker import Taker
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.server import PeerServer
from dsuf.kv.transport.streams import Address
from tests.kv.test_handoff import Pair, until

SECRET = Credentials(b"a secret of the fleet")
TERMS = Terms("toy")
NEAR, FAR = NodeName("near", "boot 1"), NodeName("far", "boot 2")


class Remote(Pair):
    """A pair whose halves know each other through a server and a connection. Use within `async with`."""

    def __init__(
        self, *, server: dict[str, Any] | None = None, peer: dict[str, Any] | None = None, **pair: Any
    ) -> None:
        super().__init__(**pair)
        self._server, self._peer = server or {}, peer or {}
        self.credentials = SECRET

    async def __aenter__(self) -> "Remote":
        """Listen; the near node dials when it first needs to."""
        self.sockets = count_sockets()
        self.server = PeerServer(FAR, self.giver, TERMS, self.credentials, **self._server)
        self.port = await self.server.listen("127.0.0.1", 0)
        self.peer = self.make_peer(**self._peer)
        self.taker = Taker(self.near.sessions, self.peer, self.near.metrics, deadline_s=self.taker._deadline_s)
        return self

    def make_peer(self, **options: Any) -> PeerGiver:
        """A way from the near node to the far one."""
        stall_s = options.pop("stall_s", 10.0)
        address = Address(NEAR, FAR, "127.0.0.1", self.port, TERMS, self.credentials, options.pop("dial_s", 5.0))
        return PeerGiver(FAR, over_tcp(address, None, stall_s), **options)

    async def __aexit__(self, kind: Any, *_: object) -> None:
        """Everything comes back: pages, blocks, leases, tasks, descriptors."""
        while self.taker._leaving:
            await asyncio.wait(self.taker._leaving)
        if kind is None:
            await until(lambda: self.server.counters()["offers"] == 0)
        await self.peer.close()
        await self.server.close()
        if kind is None:
            assert set(self.server.counters().values()) == {0}, self.server.counters()
            assert self.peer._taken == {}
            await self.close()
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
            await until(lambda: count_sockets() <= self.sockets)


def count_sockets() -> int:
    """Open sockets of this process; other descriptors may be the event loop's own."""
    here = "/proc/self/fd/"
    links = (os.readlink(here + name) for name in os.listdir(here) if os.path.islink(here + name))
    return sum(link.startswith("socket:") for link in links)

"""All peers of a node, as far as it asks them for caches: one connection each, made when it is first needed."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from dsuf.kv.directory.contract import Member
from dsuf.kv.pulls import Speed
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import Fabric, NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.streams import Address
from dsuf.observe.metrics import Metrics

DEADLINE_S = 10.0
"""For each thing that is asked of a peer, the next piece of a prompt that it computes among them."""

AVOID_S = 1.0
"""A peer that was too slow is left alone for so long at first."""


class _Peer:
    """A process of the fleet, what takes caches over from it, and what its bytes cost, as learned at `learned_s`."""

    def __init__(self, giver: PeerGiver, taker: Taker, rdma: bool) -> None:
        self.giver, self.taker, self.rdma = giver, taker, rdma
        self.learned, self.learned_s = Speed(), time.monotonic()

    @property
    def speed(self) -> Speed:
        """What its bytes cost, as far as that is remembered."""
        return self.learned.forget(time.monotonic() - self.learned_s)


class FleetPeers:
    """Implements `Peers` for the node `me`, over TCP, or over `fabric` with those that have one too. A member in
    another boot is another peer: what was known of it says nothing."""

    def __init__(
        self, me: NodeName, sessions: Sessions, metrics: Metrics, terms: Terms, credentials: Credentials, *,
        fabric: Fabric | None = None, deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self._me, self._sessions, self._metrics = me, sessions, metrics
        self._terms, self._credentials, self._fabric, self._deadline_s = terms, credentials, fabric, deadline_s
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def taker(self, member: Member) -> Taker | None:
        """What takes caches over from `member`; None while it is left alone."""
        taker = self._reach(member).taker
        return None if taker.avoids else taker

    def giver(self, member: Member) -> PeerGiver:
        """The other end, to tell it something."""
        return self._reach(member).giver

    def speed(self, member: Member) -> Speed:
        """What its bytes cost."""
        return self._reach(member).speed

    def learn(self, member: Member, size_bytes: int, seconds: float) -> None:
        """So many bytes came from it in `seconds`."""
        peer = self._reach(member)
        peer.learned, peer.learned_s = peer.speed.learn(size_bytes, seconds), time.monotonic()

    async def is_alive(self, member: Member, seconds: float) -> bool:
        """Whether it gives a sign of life within `seconds`."""
        return await self._reach(member).giver.is_alive(seconds)

    def refusals(self) -> dict[str, str]:
        """By node, why there is no connection to it: it or this node does not want one."""
        return {node: peer.giver.refusal for (node, _), peer in sorted(self._peers.items()) if peer.giver.refusal}

    def greet(self, members: Iterable[Member]) -> None:
        """Connect to those of `members` to which that was not tried yet: a node that others refuse should say so before
        a turn needs them."""
        for member in members:
            if (member.node, member.boot) not in self._peers:
                self._watch(self._reach(member).giver.greet())

    def keep(self, members: Iterable[Member]) -> None:
        """Part from all that are none of `members`."""
        alive = {(member.node, member.boot) for member in members}
        for key in [key for key in self._peers if key not in alive]:
            self._watch(self._peers.pop(key).giver.close())

    def counters(self) -> dict[str, int]:
        """Connections that stand, by what moves bytes, and peers that are left alone."""
        connected = [peer for peer in self._peers.values() if peer.giver.is_connected]
        rdma = sum(peer.rdma for peer in connected)
        suspects = sum(peer.taker.avoids for peer in self._peers.values())
        return {"tcp": len(connected) - rdma, "rdma": rdma, "suspects": suspects}

    async def close(self) -> None:
        """Part from all."""
        self.keep(())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Have `work` done, which nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reach(self, member: Member) -> _Peer:
        """The peer that `member` is, not connected yet if it is new."""
        key = (member.node, member.boot)
        if (peer := self._peers.get(key)) is None:
            other = NodeName(member.node, member.boot)
            address = Address(self._me, other, member.host, member.port, self._terms, self._credentials)
            giver = PeerGiver(other, over_tcp(address, self._fabric), on_read=self._metrics.fleet.count_pulled)
            taker = Taker(self._sessions, giver, self._metrics, deadline_s=self._deadline_s, avoid_s=AVOID_S)
            peer = self._peers[key] = _Peer(giver, taker, self._fabric is not None and member.rdma)
        return peer

"""Pitfall 14: a peer that is cut off, frozen, slow, lying or restarted costs time; the turn has its tokens."""

import asyncio
import random
from typing import Any

import pytest

from dsuf.errors import CheckpointError, PeerError
from dsuf.kv import taker
from dsuf.kv.handoff import Piece
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver
from dsuf.kv.transport.server import PeerServer
from tests.kv.rig import ids
from tests.kv.test_handoff import until
from tests.kv.transport.proxy import Proxy
from tests.kv.transport.rig import NEAR, SECRET, TERMS, Remote
from tests.toy import make_turn

WHOLE_BYTES = 2500
"""About what comes back for the prompts below."""


class Shaky(Remote):
    """A pair with a proxy between its halves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            deadline_s=options.pop("deadline_s", 0.25), server={"silence_s": 1, "stall_s": 1, "hello_s": 1},
            peer={"silence_s": 1, "stall_s": 0.5, "dial_s": 0.5, "retry_s": 0.001, "ask_s": 0.5, "tell_s": 0.25},
            **options,
        )  # fmt: skip
        self.proxy = Proxy()

    def make_peer(self, **options: Any) -> PeerGiver:
        """The way leads through the proxy."""
        self.port = self.proxy.port
        return super().make_peer(**options)

    async def __aenter__(self) -> "Shaky":
        """The proxy has to know where to, and the peer where from."""
        listen = PeerServer.listen

        async def listen_behind(server: PeerServer, host: str, port: int) -> int:
            await self.proxy.start(await listen(server, host, port))
            return self.proxy.port

        PeerServer.listen = listen_behind  # type: ignore[method-assign]
        try:
            await super().__aenter__()
        finally:
            PeerServer.listen = listen  # type: ignore[method-assign]
        return self

    async def __aexit__(self, kind: Any, *rest: object) -> None:
        """Whatever the proxy held back is gone."""
        await self.proxy.stop()
        await super().__aexit__(kind, *rest)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A giver that failed is asked again at once, and prompts come in several parts."""
    monkeypatch.setattr(taker, "AVOID_MOST_S", 0.0)
    monkeypatch.setattr(taker, "PART_BLOCKS", 5)


def count_failed(pair: Remote) -> float:
    """Takings that failed so far."""
    lines = pair.near.metrics.render().decode().splitlines()
    found = (line for line in lines if line.startswith('dsuf_session_cache_handoffs_total{result="failed"}'))
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize("fault", ["cut_at", "flip_at", "freeze_at"])
@pytest.mark.parametrize(
    "compute", [pytest.param(True, marks=pytest.mark.full, id="computed"), pytest.param(False, id="kept")]
)
async def test_a_fault_anywhere_on_the_way(fault: str, compute: bool) -> None:
    """At many places of what comes back; afterwards the peer is of use again."""
    rng = random.Random(f"{fault} {compute}")
    rounds, failed = (2 if fault == "freeze_at" else 25), 0
    async with Shaky() as pair:
        for number in range(rounds):
            prompt = ids([number], rng.randint(40, 90))
            if not compute:
                await pair.far.run(make_turn(f"far {number}", prompt))
            before = count_failed(pair)
            setattr(pair.proxy, fault, pair.proxy.came_bytes + rng.randrange(WHOLE_BYTES))
            await pair.run(make_turn(str(number), prompt), compute)
            failed += count_failed(pair) > before
            setattr(pair.proxy, fault, None)
            if fault == "freeze_at":
                await until(lambda: not pair.peer.is_connected, 20)
        assert failed > rounds // 4 or fault == "freeze_at"
        restored = None
        for number in range(5):
            restored, _ = await pair.run(make_turn(f"again {number}", ids([500 + number], 40)))
            if restored.peer_tokens:
                break
        assert restored is not None and restored.peer_tokens > 0


async def test_a_slow_peer_is_given_up_when_the_time_is_over() -> None:
    async with Shaky(deadline_s=0.1) as pair:
        await pair.far.run(make_turn("a", ids(90)))
        pair.proxy.slow_s = 0.08
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        assert await pair.taker.take(make_turn("b", ids(90)), compute=False) is None
        assert loop.time() - started_s < 5
        pair.proxy.slow_s = 0.0


async def test_a_peer_that_was_restarted_is_another_one() -> None:
    """The same address, the same name: what the earlier process promised is void."""
    async with Remote(deadline_s=2, peer={"retry_s": 0.001}) as pair:
        await pair.run(make_turn("a", ids(60)))
        await pair.server.close()
        await until(lambda: not pair.peer.is_connected)
        again = PeerServer(NodeName("far", "boot 3"), pair.giver, TERMS, SECRET)
        assert await again.listen("127.0.0.1", pair.port) == pair.port
        assert await pair.taker.take(make_turn("b", ids(61, [5, 6, 7, 8, 9, 10, 11, 12, 13]))) is None
        assert "anew" in pair.peer._why
        await again.close()


async def test_a_peer_that_comes_back_is_asked_again() -> None:
    """Its control connection broke; the next turn makes a new one, and the server forgets the old one."""
    async with Remote(deadline_s=2) as pair:
        for number in range(3):
            restored, _ = await pair.run(make_turn(str(number), ids([number], 60)))
            assert restored.peer_tokens > 0
            next(iter(pair.server._guests.values())).link.end("a fault")
            await until(lambda: not pair.peer.is_connected)


async def test_a_second_connection_of_a_peer_replaces_the_first() -> None:
    async with Remote(deadline_s=2) as pair:
        await pair.run(make_turn("a", ids(60)))
        other = pair.make_peer()
        await pair.far.run(make_turn("b", ids(50)))
        offer = await other.offer(make_turn("c", ids(50)), 0, compute=False)
        assert offer is not None
        await until(lambda: not pair.peer.is_connected)
        assert await other.release(offer)
        await other.leave(make_turn("c", ids(50)))
        await other.close()


async def test_offers_are_only_for_whom_they_were_made() -> None:
    """A number can be guessed; it opens nothing to another peer."""
    async with Remote(deadline_s=2) as pair:
        await pair.far.run(make_turn("a", ids(60)))
        offer = await pair.peer.offer(make_turn("b", ids(60)), 0, compute=False)
        assert offer is not None
        with pytest.raises(CheckpointError):
            pair.server.view(NodeName("thief", "boot"), offer.id, offer.pages[0])
        with pytest.raises(CheckpointError):
            pair.server.view(NEAR, offer.id + 1, offer.pages[0])
        with pytest.raises(CheckpointError):  # nor to blocks beside those offered
            pair.server.view(NEAR, offer.id, Piece(offer.pages[0].block, offer.pages[0].generation + 2))
        view = memoryview(bytearray(96))
        with pytest.raises(PeerError, match="lease has ended"):
            await pair.peer.read(offer, [Piece(199, 0)], [view])
        assert await pair.peer.release(offer)
        await pair.peer.leave(make_turn("b", ids(60)))

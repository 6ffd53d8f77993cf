"""Where peers come in: connections are accepted, have to prove themselves, and then ask for what this node keeps."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from dsuf.errors import CheckpointError, PeerError, PeerLost
from dsuf.kv.giver import LEASE_S, LocalGiver
from dsuf.kv.handoff import Piece
from dsuf.kv.transport.data import STALL_S, Outlet
from dsuf.kv.transport.hello import Credentials, Purpose, Stream, Terms, answer
from dsuf.kv.transport.link import SILENCE_S, Link
from dsuf.kv.transport.mover import Fabric, NodeName, Owner
from dsuf.kv.transport.service import GiverService, Invited, decline
from dsuf.kv.transport.streams import STREAM_BYTES, StreamWire, close_stream
from dsuf.kv.transport.wire import Wire
from dsuf.observe.log import log_event

HELLO_S = 5.0
"""A connection must have proved itself after so long."""
MOST_STRANGERS = 64
"""Connections that have not proved themselves yet; further ones are closed at once."""
MOST_CONNECTIONS = 1024
CLOSE_S = 5.0
"""How long closing waits while nothing ends."""
_LOG_EVERY_S = 10.0


class _Guest:
    """A peer that is connected: its questions, and what answers them."""

    def __init__(self, link: Link, service: GiverService) -> None:
        self.link, self.service = link, service


class PeerServer:
    """Serves `giver` to the peers of `me`. `terms` and `credentials` are this node's; `fabric` lets them read the arena
    by themselves. `invited` is asked when a peer wants this node to take something; `on_sent` hears how many bytes went
    to one over TCP: what it reads by itself nobody here sees."""

    def __init__(
        self, me: NodeName, giver: LocalGiver, terms: Terms, credentials: Credentials, *,
        fabric: Fabric | None = None, invited: Invited = decline,
        on_sent: Callable[[int], None] = lambda size_bytes: None, hello_s: float = HELLO_S,
        silence_s: float = SILENCE_S, stall_s: float = STALL_S, idle_s: float = 2 * LEASE_S,
    ) -> None:  # fmt: skip
        self.served_bytes = self.refused = 0
        self._me, self._giver, self._terms, self._credentials = me, giver, terms, credentials
        self._fabric, self._invited, self._on_sent = fabric, invited, on_sent
        self._hello_s, self._silence_s, self._stall_s, self._idle_s = hello_s, silence_s, stall_s, idle_s
        self._guests: dict[NodeName, _Guest] = {}
        self._open: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self._strangers = 0
        self._numbers = count()
        self._logged_s = -_LOG_EVERY_S
        self._server: asyncio.Server | None = None
        giver.fence = self._fence

    async def listen(self, host: str, port: int) -> int:
        """Accept peers from now on; the port, which the system chooses where it is 0. Raises `OSError`."""
        self._server = await asyncio.start_server(
            self._accept, host, port, ssl=self._credentials.called, limit=STREAM_BYTES,
            ssl_handshake_timeout=None if self._credentials.called is None else self._hello_s,
        )  # fmt: skip
        return int(self._server.sockets[0].getsockname()[1])

    def counters(self) -> Mapping[str, int]:
        """Peers, connections and those that have not proved themselves, turns that are asked for, offers that are out;
        all are zero when idle and nobody is connected."""
        held = [guest.service.counters() for guest in self._guests.values()]
        sums = {name: sum(counters[name] for counters in held) for name in ("turns", "offers")}
        own = {"peers": len(self._guests), "connections": len(self._open), "strangers": self._strangers}
        return {**own, **sums, "closing": len(self._closing)}

    def welcome(self, peer: NodeName, wire: Wire, terms: Terms) -> Link:
        """Serve `peer`, which has proved itself, over `wire`. An earlier connection of it ends."""
        if (earlier := self._guests.pop(peer, None)) is not None:
            earlier.link.end("connected anew")
        owner = self._owner(terms)
        prefix = f"{peer.node}/{peer.boot[:8]}/{next(self._numbers)}/"
        service = GiverService(self._giver, prefix, owner, self._invited, self._idle_s)
        link = Link(wire, service.answer, silence_s=self._silence_s, on_end=lambda: self._part(peer, service))
        if link.is_open:
            self._guests[peer] = _Guest(link, service)
        return link

    def view(self, peer: NodeName, number: int, piece: Piece) -> memoryview:
        """A block of an offer to `peer`; raises `CheckpointError` where it is none."""
        if (guest := self._guests.get(peer)) is None:
            raise CheckpointError("nothing is lent without a control connection")
        return guest.service.view(number, piece)

    async def close(self) -> None:
        """Accept nobody any more, end all connections, and wait until nothing goes on, as long as something ends."""
        if self._server is not None:
            self._server.close()
        for guest in list(self._guests.values()):
            guest.link.end("closed")
        for task in list(self._open):
            task.cancel()
        while left := {*self._open, *self._closing}:
            done, _ = await asyncio.wait(left, timeout=CLOSE_S)
            if not done:
                log_event("peers not gone", level="warning", left=len(left))
                return
            await asyncio.sleep(0)  # what they leave behind is cleared away by then

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        stream, task = Stream(reader, writer), asyncio.current_task()
        if task is None or self._strangers >= MOST_STRANGERS or len(self._open) >= MOST_CONNECTIONS:
            self._refuse("too many connections")
            writer.transport.abort()
            return
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            if (greeted := await self._greet(stream)) is not None:
                await self._serve(stream, *greeted)
        except asyncio.CancelledError:
            writer.transport.abort()
        except Exception as error:
            writer.transport.abort()
            log_event("peer connection failed", level="error", error=error)
        finally:
            await close_stream(stream)

    async def _greet(self, stream: Stream) -> tuple[NodeName, Purpose, Terms] | None:
        """Who it is, once it has proved itself; None where it has not."""
        self._strangers += 1
        try:
            async with asyncio.timeout(self._hello_s):
                return await answer(stream, self._me, self._terms, self._credentials)
        except (PeerError, OSError, TimeoutError) as error:
            self._refuse(str(error) or "it did not prove itself in time")
            if not isinstance(error, PeerError) or isinstance(error, PeerLost):
                stream.writer.transport.abort()
            return None
        finally:
            self._strangers -= 1

    async def _serve(self, stream: Stream, peer: NodeName, purpose: Purpose, terms: Terms) -> None:
        """Serve a connection to its end."""
        if purpose == "data":
            try:
                await Outlet(
                    stream, lambda number, piece: self.view(peer, number, piece), self._count, self._stall_s
                ).run()  # fmt: skip
            except PeerError as error:
                log_event("peer data connection ended", level="debug", peer=peer.node, reason=str(error))
            return
        link = self.welcome(peer, StreamWire(stream), terms)
        log_event("peer connected", peer=peer.node)
        try:
            await link.wait_ended()
        finally:
            await link.close()

    def _owner(self, terms: Terms) -> Owner | None:
        """What lets a peer read by itself, where both have a fabric."""
        return self._fabric.owner() if self._fabric is not None and terms.fabric else None

    def _part(self, peer: NodeName, service: GiverService) -> None:
        """A peer's connection has ended: what it held comes back."""
        if (guest := self._guests.get(peer)) is not None and guest.service is service:
            del self._guests[peer]
        closing = asyncio.ensure_future(service.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _fence(self, number: int) -> None:
        """Before a lease is returned other than by who has it."""
        for guest in self._guests.values():
            if guest.service.fence(number):
                return

    def _count(self, size_bytes: int) -> None:
        """So many bytes went to peers."""
        self.served_bytes += size_bytes
        self._on_sent(size_bytes)

    def _refuse(self, why: str) -> None:
        """Count a connection that got nothing; log it, but not each of many."""
        self.refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log_event("peer refused", level="warning", reason=why, refused=self.refused)

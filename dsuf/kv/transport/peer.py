"""A remote node as a giver: connected when it is first asked, and anew after it was lost."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from dsuf.errors import PeerError, PeerLost
from dsuf.kv.calls import work
from dsuf.kv.handoff import WAIT_S, Offer, Piece
from dsuf.kv.trace import ID_BYTES, Trace
from dsuf.kv.transport.data import STALL_S
from dsuf.kv.transport.fallback import FallbackMover
from dsuf.kv.transport.hello import Stream, Terms
from dsuf.kv.transport.link import SILENCE_S, Link
from dsuf.kv.transport.mover import Fabric, Mover, NodeName
from dsuf.kv.transport.queue_pair import QueuePairEnd, RemoteMemory
from dsuf.kv.transport.streams import Address, StreamWire
from dsuf.kv.transport.tcp import TcpMover
from dsuf.kv.transport.wire import (
    Answer,
    Ask,
    Connect,
    Connected,
    Disconnect,
    Done,
    Failed,
    Invite,
    Leave,
    Offered,
    Order,
    Question,
    Release,
    Wire,
    pack_turn,
)
from dsuf.observe.log import log_event
from dsuf.types import Turn

ASK_S = 60.0
"""Until a question is given up; who waits for the answer has a deadline of its own, which is mostly shorter."""
TELL_S = 5.0
"""Until something that takes no time is given up."""
RETRY_S, RETRY_MOST_S = 0.5, 30.0
"""A peer that could not be reached is not tried again for so long, and twice as long after each further time."""


class Ways(NamedTuple):
    """A fresh control connection to a peer that has proved itself, its terms, and what moves bytes from it."""

    wire: Wire
    terms: Terms
    mover: Mover


class _Line:
    """A connection that stands: the turns that its other end knows, and the mover of the fabric, if there is one."""

    def __init__(self, link: Link, ways: Ways) -> None:
        self.link, self.mover = link, ways.mover
        self.known: set[str] = set()


class _Taken:
    """An offer that is here: on which line, for which turn, and until when its lease lasts."""

    def __init__(self, line: _Line, turn: str, until_s: float) -> None:
        self.line, self.turn, self.until_s = line, turn, until_s


class PeerGiver:
    """Implements `Giver` for the remote node `name`. `dial` makes a connection, and raises `PeerError`; `on_read` hears
    how many bytes came. `refusal` says why it was no connection the last time, where one of the two did not want one.

    Calls raise `PeerLost` (which is a `ConnectionError`) or `TimeoutError` where the node is gone or slow, `PeerError`
    where it refuses.
    """

    def __init__(
        self, name: NodeName, dial: Callable[["PeerGiver"], Awaitable[Ways]], *,
        on_read: Callable[[int], None] = lambda size_bytes: None, ask_s: float = ASK_S,
        tell_s: float = TELL_S, silence_s: float = SILENCE_S, retry_s: float = RETRY_S,
    ) -> None:  # fmt: skip
        self.name = name
        self.pulled_bytes = 0
        self.refusal = ""
        self._on_read = on_read
        self._dial, self._ask_s, self._tell_s, self._silence_s = dial, ask_s, tell_s, silence_s
        self._first_retry_s = self._retry_s = retry_s
        self._line: _Line | None = None
        self._connecting: asyncio.Task[_Line] | None = None
        self._not_before_s = 0.0
        self._why = ""
        self._taken: dict[int, _Taken] = {}
        self._closed = False

    @property
    def is_connected(self) -> bool:
        """Whether a connection stands."""
        return self._line is not None and self._line.link.is_open

    async def offer(
        self, turn: Turn, pages: int, compute: bool = True, trace: Trace | None = None, patience_s: float = WAIT_S
    ) -> Offer | None:  # fmt: skip
        """As `Giver.offer`. The lease's time counts from now."""
        line = await self._connect()
        order = None if turn.id in line.known else await self._pack(line, turn, trace)
        while True:
            asked_s = asyncio.get_running_loop().time()
            answer = await line.link.ask(Ask(turn.id, pages, compute, order, patience_s), self._ask_s)
            if not isinstance(answer, Failed):
                break
            if order is not None:
                raise PeerError(answer.text)
            order = await self._pack(line, turn, trace)
        if not isinstance(answer, Offered):
            raise PeerError("an answer to another question")
        if turn.id not in line.known:
            raise PeerLost("nobody wants the turn any more")
        if answer.offer is not None:
            self._taken[answer.offer.id] = _Taken(line, turn.id, asked_s + answer.offer.ttl_s)
        return answer.offer

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """As `Giver.read`; ends, at the latest with the lease, when nothing writes into the buffers any more."""
        taken = self._taken.get(offer.id)
        if taken is None:
            raise PeerLost("the offer's connection is gone")
        async with asyncio.timeout_at(taken.until_s):
            await taken.line.mover.read(offer, pieces, into)
        size_bytes = sum(map(len, into))
        self.pulled_bytes += size_bytes
        self._on_read(size_bytes)

    async def release(self, offer: Offer) -> bool:
        """As `Giver.release`; what took longer than the lease counts for nothing, whatever the other side says."""
        taken = self._taken.pop(offer.id, None)
        if taken is None or not taken.line.link.is_open:
            return False
        good = await self._tell(taken.line, Release(offer.id))
        return good and asyncio.get_running_loop().time() < taken.until_s

    async def leave(self, turn: Turn) -> None:
        """As `Giver.leave`; nothing is to be said where no connection stands that knows the turn."""
        line = self._line
        if line is not None and turn.id in line.known:
            line.known.discard(turn.id)
            self._forget(lambda taken: taken.turn == turn.id)
            if line.link.is_open:
                await self._tell(line, Leave(turn.id))

    async def invite(self, turn: Turn) -> bool:
        """Ask the node to take what is kept here of a prompt; whether it will."""
        line = await self._connect()
        order = await work(len(turn.prompt.ids) * ID_BYTES, pack_turn, turn)
        return await self._tell(line, Invite(order))

    async def connect_queue_pair(self, end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        """Have the node make an end for `end`."""
        answer = await (await self._connect()).link.ask(Connect(end), self._tell_s)
        if not isinstance(answer, Connected):
            raise PeerError("an answer to another question")
        return answer.end, answer.memory

    async def disconnect_queue_pair(self, number: int) -> None:
        """Have the node destroy its end for the queue pair `number`, if a connection stands."""
        if (line := self._line) is not None and line.link.is_open:
            await self._tell(line, Disconnect(number))

    async def greet(self) -> None:
        """Connect, to find out whether that goes."""
        with contextlib.suppress(PeerError):
            await self._connect()

    async def is_alive(self, seconds: float) -> bool:
        """Whether a connection stands, and the node gives a sign of life within `seconds`."""
        return self._line is not None and await self._line.link.probe(seconds)

    async def close(self) -> None:
        """Say no more, and wait until nothing goes on."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._line is not None:
            await self._line.link.close()

    async def _pack(self, line: _Line, turn: Turn, trace: Trace | None) -> Order:
        """The order for a turn, which `line` knows from now on, unless it is left meanwhile; raises `PeerLost` then."""
        line.known.add(turn.id)
        order = await work(len(turn.prompt.ids) * ID_BYTES, pack_turn, turn, trace)
        if turn.id not in line.known:
            raise PeerLost("nobody wants the turn any more")
        return order

    async def _tell(self, line: _Line, body: Question) -> bool:
        """Ask something that takes no time; the answer."""
        answer: Answer = await line.link.ask(body, self._tell_s)
        if not isinstance(answer, Done):
            raise PeerError("an answer to another question")
        return answer.good

    async def _connect(self) -> _Line:
        """The line that stands, or a new one; raises `PeerError`, at once where it was tried a moment ago."""
        if self._line is not None and self._line.link.is_open:
            return self._line
        if self._closed:
            raise PeerLost("closed")
        if self._connecting is None:
            if asyncio.get_running_loop().time() < self._not_before_s:
                raise PeerLost(f"{self.name.node} was not reached a moment ago: {self._why}")
            self._connecting = asyncio.create_task(self._open())
            self._connecting.add_done_callback(self._note)
        return await _follow(self._connecting)

    async def _open(self) -> _Line:
        """A new line."""
        ways = await self._dial(self)
        line = _Line(Link(ways.wire, silence_s=self._silence_s, on_end=lambda: self._lose(line)), ways)
        self._line = line
        return line

    def _note(self, task: asyncio.Task[_Line]) -> None:
        """Dialling has ended: after a failure it is left alone for a time."""
        self._connecting = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._retry_s, self.refusal = self._first_retry_s, ""
            return
        if isinstance(error, PeerError) and not isinstance(error, PeerLost):
            self.refusal = str(error)
        self._why = str(error)
        self._not_before_s = asyncio.get_running_loop().time() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
        log_event("peer not reached", level="warning", peer=self.name.node, reason=self._why)

    def _lose(self, line: _Line) -> None:
        """A line has ended, and with it what was offered on it."""
        line.mover.close()
        self._forget(lambda taken: taken.line is line)

    def _forget(self, which: Callable[[_Taken], bool]) -> None:
        """Offers of which nothing is to be read any more."""
        self._taken = {number: taken for number, taken in self._taken.items() if not which(taken)}


async def _follow(task: asyncio.Task[_Line]) -> _Line:
    """What `task` gives, which goes on when nobody waits any more; raises `PeerLost` where it was cancelled."""
    await asyncio.wait({task})
    if task.cancelled():
        raise PeerLost("closed")
    return task.result()


def over_tcp(
    address: Address, fabric: Fabric | None = None, stall_s: float = STALL_S
) -> Callable[[PeerGiver], Awaitable[Ways]]:
    """Dials `address`; bytes come over `fabric` where both nodes have it, else over TCP too."""

    async def dial_data() -> Stream:
        stream, _ = await address.dial("data")
        return stream

    async def dial(peer: PeerGiver) -> Ways:
        stream, terms = await address.dial("control")
        mover: Mover | None = None
        if fabric is not None and terms.fabric:
            mover = fabric.mover(terms.fabric, peer.connect_queue_pair, peer.disconnect_queue_pair)
        by_tcp = TcpMover(dial_data, stall_s)
        return Ways(StreamWire(stream), terms, by_tcp if mover is None else FallbackMover(mover, by_tcp))

    return dial

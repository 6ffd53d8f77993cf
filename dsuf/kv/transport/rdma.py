"""Caches by RDMA: blocks of a peer's arena are read straight into those of this one, over queue pairs that the control
connection joins.

A pull has a queue pair to itself, so that what breaks one does not break another, and up to some wait for their turn.
What fails costs its pair, which both sides destroy; the next pull makes a new one. Bytes that came prove nothing:
memory that serves something else by now is read just as well. The control connection tells whether a lease held.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from weakref import WeakSet

import msgspec

from dsuf.errors import DeviceError, PeerError, PeerLost
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.transport.adapter import Adapter
from dsuf.kv.transport.mover import Connect, Disconnect
from dsuf.kv.transport.queue_pair import Pair, QueuePairEnd, Read, RemoteMemory
from dsuf.kv.transport.reads import plan_reads
from dsuf.observe.log import log_event

GONE = ("RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "RESP_TIMEOUT_ERR")
"""Statuses of reads that nobody answered."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a node reads: at most `pairs` pulls of one peer at a time, each with `reads` reads of up to `chunk_bytes`
    under way. One that moves nothing for `stall_s` has failed, and one that was broken off ends within `flush_s`."""

    pairs: int = 2
    reads: int = 8
    chunk_bytes: int = 1 << 20
    stall_s: float = 5.0
    flush_s: float = 1.0


class RdmaFabric:
    """The RDMA of a node: what reads from each peer, and what each peer reads through."""

    def __init__(self, adapter: Adapter, pace: Pace | None = None) -> None:
        self._adapter, self._pace = adapter, pace or Pace()
        self._movers: WeakSet[RdmaMover] = WeakSet()

    def describe(self) -> bytes:
        """What other nodes hear of it: that it is there, and how it is spoken to."""
        return b"rdma 1"

    def mover(self, described: bytes, connect: Connect, disconnect: Disconnect) -> "RdmaMover | None":
        """What reads from the peer that described itself so; None where that speaks another way."""
        if described != self.describe():
            return None
        mover = RdmaMover(self._adapter, connect, disconnect, self._pace)
        self._movers.add(mover)
        return mover

    def owner(self) -> "RdmaOwner":
        """The half that a peer reads through."""
        return RdmaOwner(self._adapter, 4 * self._pace.pairs)

    def close(self) -> None:
        """All that is under way fails; memory and device are given back."""
        for mover in list(self._movers):
            mover.close()
        self._adapter.close()


class RdmaOwner:
    """The queue pairs through which one peer reads, `limit` at most, by the numbers of theirs."""

    def __init__(self, adapter: Adapter, limit: int) -> None:
        self._adapter, self._limit = adapter, limit
        self._pairs: dict[int, Pair] = {}

    def accept(self, end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        """A new pair for that of the peer, ready before the peer hears of it; raises `PeerError`."""
        self.destroy(end.number)
        if len(self._pairs) >= self._limit:
            raise PeerError(f"a peer asks for more than {self._limit} queue pairs")
        try:
            pair = self._adapter.accept_pair(end)
        except (DeviceError, ValueError) as error:
            raise PeerError(f"no queue pair for a peer: {error}") from error
        self._pairs[end.number] = pair
        return pair.end, self._adapter.memory

    def destroy(self, number: int) -> None:
        """The peer does not use its pair `number` any more: destroy the one here. Idempotent."""
        if (pair := self._pairs.pop(number, None)) is not None:
            self._adapter.drop_pair(pair)

    def close(self) -> None:
        """When this returns, the peer cannot read anything here until it connects again."""
        for number in list(self._pairs):
            self.destroy(number)


class RdmaMover:
    """Implements `Mover`: reads from one peer. `connect` asks it to join a pair of its own with ours, `disconnect`
    tells it which of ours is not used any more."""

    def __init__(self, adapter: Adapter, connect: Connect, disconnect: Disconnect, pace: Pace) -> None:
        self._adapter, self._connect, self._disconnect, self._pace = adapter, connect, disconnect, pace
        self._room = asyncio.Semaphore(pace.pairs)
        self._idle: list[_Line] = []
        self._busy: set[_Line] = set()
        self._telling: set[asyncio.Future[None]] = set()
        self._open = True

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Fill `into`. When this has ended, however it did, nothing is written there any more."""
        try:
            async with self._room:
                await self._read(pieces, into)
        except DeviceError as error:
            raise PeerError(f"reading by rdma: {error}") from error

    def close(self) -> None:
        """Destroy all pairs; calls under way fail."""
        self._open = False
        for line in (*self._idle, *self._busy):
            line.close("closed")
        self._idle.clear()

    def _drop_idle(self) -> None:
        """Do without the pairs that were used before."""
        while self._idle:
            line = self._idle.pop()
            line.close("perhaps gone")
            self._tell(line.number)

    async def _read(self, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """With a pair of its own. One that was used before may have been destroyed by the peer meanwhile, as all are
        when a lease runs out; then nothing but a new one tells whether it is there."""
        if self._idle:
            try:
                await self._use(self._idle.pop(), pieces, into)
            except PeerLost:
                self._drop_idle()
            else:
                return
        await self._use(await self._dial(), pieces, into)

    async def _use(self, line: "_Line", pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Read through `line`, which is idle afterwards or gone."""
        self._busy.add(line)
        try:
            await line.pull(plan_reads(self._adapter, line.memory, pieces, into, self._chunk_bytes))
        except BaseException:
            self._tell(line.number)
            await _outlast(asyncio.ensure_future(line.abort()))
            raise
        finally:
            self._busy.discard(line)
        self._idle.append(line)

    @property
    def _chunk_bytes(self) -> int:
        return min(self._pace.chunk_bytes, self._adapter.device.most_bytes)

    async def _dial(self) -> "_Line":
        """A new pair, joined with one of the peer."""
        if not self._open:
            raise PeerLost("the connection to the peer is closed")
        pair = self._adapter.make_pair(self._pace.reads)
        try:
            other, memory = await self._connect(pair.end)
            pair.connect(other)
            if not self._open:
                raise PeerLost("the connection to the peer is closed")
        except BaseException as error:
            self._tell(pair.end.number)
            self._adapter.drop_pair(pair)
            if isinstance(error, ValueError):
                raise PeerError(f"a peer's queue pair makes no sense: {error}") from error
            raise
        return _Line(self._adapter, pair, memory, self._pace)

    def _tell(self, number: int) -> None:
        """Let the peer destroy what is joined with our pair `number`; nobody waits for it."""
        telling = asyncio.ensure_future(self._tell_within(number))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell_within(self, number: int) -> None:
        try:
            async with asyncio.timeout(self._pace.stall_s):
                await self._disconnect(number)
        except Exception as error:
            log_event("queue pair not ended", reason=str(error))


class _Line:
    """A queue pair of ours that is joined with one of a peer, whose arena is `memory`."""

    def __init__(self, adapter: Adapter, pair: Pair, memory: RemoteMemory, pace: Pace) -> None:
        self.number, self.memory = pair.end.number, memory
        self._adapter, self._pair, self._pace = adapter, pair, pace
        self._numbers = count(1)
        self._under_way: set[int] = set()
        self._trouble = ""
        self._moved = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pair.descriptor, self._collect)

    async def pull(self, reads: Iterator[Read]) -> None:
        """Do `reads`, so many at a time; raises `PeerError`, or `PeerLost` where nobody answers."""
        for read in reads:
            while len(self._under_way) >= self._pace.reads:
                await self._progress()
            self._check()
            number = next(self._numbers)
            self._pair.read(number, read, self._adapter.region, self.memory.key)
            self._under_way.add(number)
        while self._under_way:
            await self._progress()
        self._check()

    async def abort(self) -> None:
        """Break off what is under way, wait until it has ended, and destroy the pair."""
        try:
            if self._under_way and not self._trouble:
                self._pair.fail()
            async with asyncio.timeout(self._pace.flush_s):
                while self._under_way:
                    self._moved.clear()
                    await self._moved.wait()
        except (TimeoutError, DeviceError) as error:
            log_event("queue pair not flushed", level="warning", error=error, reads=len(self._under_way))
        finally:
            self.close("broken off")

    def close(self, trouble: str) -> None:
        """Destroy the pair, after which nothing is written through it; idempotent."""
        self._trouble = self._trouble or trouble
        self._loop.remove_reader(self._pair.descriptor)
        self._adapter.drop_pair(self._pair)
        self._under_way.clear()
        self._moved.set()

    async def _progress(self) -> None:
        """Wait for a read to end, well or not; not for ever, since a completion may never come."""
        self._check()
        self._moved.clear()
        try:
            async with asyncio.timeout(self._pace.stall_s):
                await self._moved.wait()
        except TimeoutError:
            raise PeerLost(f"nothing was read for {self._pace.stall_s} s") from None
        self._check()

    def _collect(self) -> None:
        """Reads have ended. The first that failed says why; those after it were only flushed."""
        try:
            for ended in self._pair.take():
                self._under_way.discard(ended.read)
                self._trouble = self._trouble or ended.status
        except DeviceError as error:
            self._trouble = self._trouble or str(error)
            self._loop.remove_reader(self._pair.descriptor)
        self._moved.set()

    def _check(self) -> None:
        """Raise what went wrong."""
        if self._trouble in GONE:
            raise PeerLost(f"the peer does not answer ({self._trouble})")
        if self._trouble:
            raise PeerError(f"a read failed ({self._trouble})")


async def _outlast(call: asyncio.Future[None]) -> None:
    """Wait until `call`, which ends in time, has ended; only then let a cancellation through."""
    cancelled = False
    while not call.done():
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    call.result()

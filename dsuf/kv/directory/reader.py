"""Hearing the fleet: news as they come, and the records of those of whom some are missing."""

import asyncio
import time

from dsuf.kv.directory.board import Board, BoardFailed, Record, Subscription
from dsuf.kv.directory.news import Name, NotNews, decode_news
from dsuf.kv.directory.pace import Pace
from dsuf.kv.directory.roster import Peer, Roster
from dsuf.kv.directory.trouble import Trouble
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics

_TICK_S = 0.1
_SLICE_ENTRIES = 2000
"""Entries that are taken in before others have their turn on the event loop: about 5 ms."""
_READS = 2


class Reader:
    """Keeps `roster` and its book up to date from `board`. `known` is set once all were read that were there first."""

    def __init__(self, board: Board, roster: Roster, pace: Pace, trouble: Trouble, metrics: Metrics) -> None:
        self.known = asyncio.Event()
        self._board, self._roster, self._pace = board, roster, pace
        self._trouble, self._metrics = trouble, metrics
        self._first: set[Peer] | None = None
        self._reads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Listen until cancelled; what is known stays when there is nothing to hear."""
        try:
            while True:
                try:
                    async with self._board.subscribe() as subscription:
                        if self._first is None:
                            self._meet(await self._board.names())
                        await self._listen(subscription)
                except BoardFailed as error:
                    await asyncio.sleep(self._trouble.fail(error))
        finally:
            await self._end_reads()

    def _meet(self, names: list[Name]) -> None:
        """Read the records of those who are there; the subscription already collects what they change meanwhile."""
        self._first = set(self._roster.meet(names))
        self._check_known()

    async def _listen(self, subscription: Subscription) -> None:
        """Take in news until there are no more."""
        heard_s = time.monotonic()
        while True:
            data = await subscription.next(_TICK_S)
            now_s = time.monotonic()
            if data is not None:
                heard_s = now_s
                self._trouble.clear()
                self._hear(data, now_s)
            elif now_s - heard_s > self._pace.silence_s:
                raise BoardFailed(f"nothing was heard for {now_s - heard_s:.1f} s, not even of this node")
            await self._sweep()
            self._begin_reads(now_s)

    async def _sweep(self) -> None:
        """Forget what those kept that are gone, slice by slice. Others have their turn in any case: a burst of news
        must not keep the event loop."""
        left = True
        while left:
            left = self._roster.sweep(_SLICE_ENTRIES)
            await asyncio.sleep(0)

    def _hear(self, data: bytes, now_s: float) -> None:
        """Take in one announcement."""
        try:
            self._roster.hear(decode_news(data), now_s)
        except NotNews as error:
            self._metrics.fleet.count_error()
            log_event("news not understood", level="debug", reason=str(error))

    def _begin_reads(self, now_s: float) -> None:
        """Read records that are due, a few at a time."""
        due = [peer for peer in self._roster.stale() if now_s >= peer.read_s]
        for peer in due[: _READS - len(self._reads)]:
            peer.read_s = now_s + self._pace.resync_s
            self._roster.begin_read(peer)
            task = asyncio.create_task(self._read(peer))
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)

    async def _read(self, peer: Peer) -> None:
        """Read the record of `peer`; again later where that fails."""
        read = False
        try:
            record = await self._board.read(peer.name)
            if record is not None and self._roster.is_here(peer):
                if peer.number is not None:
                    self._metrics.fleet.count_resync()
                await self._replace(peer, record)
                read = self._roster.is_here(peer)
                if read:
                    self._roster.end_read(peer, record.member, record.number)
            elif not peer.live:  # it is gone, and its name was left behind
                self._roster.forget(peer)
                await self._board.forget(peer.name)
        except BoardFailed as error:
            self._metrics.fleet.count_error()
            log_event("record not read", level="debug", node=peer.name.node, reason=str(error))
        finally:
            if not read:
                self._roster.give_up_read(peer)
            if self._first is not None:
                self._first.discard(peer)
                self._check_known()

    async def _replace(self, peer: Peer, record: Record) -> None:
        """Let the book have what `record` holds of `peer`, slice by slice."""
        book, holder = self._roster.book, peer.holder
        held = book.held(holder)
        gone, new = list(held - record.entries), list(record.entries - held)
        for start in range(0, max(len(gone), len(new)), _SLICE_ENTRIES):
            book.remove(holder, gone[start : start + _SLICE_ENTRIES])
            book.add(holder, new[start : start + _SLICE_ENTRIES])
            await asyncio.sleep(0)
            if not self._roster.is_here(peer):
                return

    def _check_known(self) -> None:
        """Whether all who were there at first were read, or could not be."""
        if not self._first:
            self.known.set()

    async def _end_reads(self) -> None:
        """Break off what is being read."""
        reads = list(self._reads)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

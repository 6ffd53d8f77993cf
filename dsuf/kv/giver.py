"""A giver within the process: the session caches of one engine, for those of another."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, islice
from typing import Any

from dsuf.errors import CheckpointError
from dsuf.kv.calls import see_through, when_ended, work
from dsuf.kv.claims import Lease
from dsuf.kv.handoff import WAIT_S, Offer, Piece
from dsuf.kv.point import CommitPoint, HostPage
from dsuf.kv.prefix import Node
from dsuf.kv.sessions import Sessions
from dsuf.kv.trace import ID_BYTES, Trace, trace_prompt
from dsuf.types import CacheLayout, Extent, Turn

LEASE_S = 30.0
OFFER_PAGES = 1024
"""Pages of one offer at most: what can be read within a lease, even slowly."""


class _Order:
    """A prompt that is wanted, the computing of it (`compute`) or of nothing, and what ends it where nobody asks any
    more."""

    def __init__(self, turn: str, trace: Trace, compute: bool, computing: asyncio.Future[None]) -> None:
        self.turn, self.trace, self.compute, self.computing = turn, trace, compute, computing
        self.path: list[Node] = []
        self.timer: asyncio.TimerHandle | None = None
        self.left = False


class _Lent:
    """An offer that is out: its lease, what ends it after its time, and its blocks."""

    def __init__(self, turn: str, lease: Lease, timer: asyncio.TimerHandle, pieces: frozenset[Piece]) -> None:
        self.turn, self.lease, self.timer, self.pieces = turn, lease, timer, pieces


class LocalGiver:
    """Implements `Giver` over `sessions`. `compute` takes a turn to the end of its prompt in their engine, and has what
    it made of it kept, with a state at the end; it may be cancelled. Leases end after `lease_s`, and so do prompts that
    nobody asks for. `fence` is called with an offer's number before its lease is returned other than by who took it:
    after that nothing may read what was offered from outside.
    """

    def __init__(
        self, sessions: Sessions, compute: Callable[[Turn], Awaitable[None]], *, lease_s: float = LEASE_S
    ) -> None:  # fmt: skip
        self._sessions, self._arena, self._compute, self._lease_s = sessions, sessions.arena, compute, lease_s
        self._orders: dict[str, _Order] = {}
        self._lent: dict[int, _Lent] = {}
        self._numbers = count()
        self.fence: Callable[[int], None] = lambda number: None

    async def offer(
        self, turn: Turn, pages: int, compute: bool = True, trace: Trace | None = None, patience_s: float = WAIT_S
    ) -> Offer | None:  # fmt: skip
        """What is kept after the first `pages` pages, once there is something; None when nothing more is to come. Where
        its `trace` is known, a turn that is not to be computed needs no tokens."""
        order = await self._order(turn, compute, trace, patience_s)
        try:
            if not compute:  # what is about to be kept saves more than what is there
                await asyncio.wait({order.computing})
            while True:
                kept: asyncio.Future[Any] = asyncio.ensure_future(self._sessions.kept.wait())
                ended = order.computing.done()
                try:
                    if (found := self._find(order, pages)) is not None:
                        return found
                    if ended:
                        self._conclude(order)
                        return None
                    await asyncio.wait({kept, order.computing}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    kept.cancel()
        finally:
            self._time(order)

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Copy blocks; raises `CheckpointError` where the lease has ended already."""
        if offer.id not in self._lent:
            raise CheckpointError("the lease has ended")
        await see_through(work(sum(map(len, into)), self._copy, pieces, into))

    async def release(self, offer: Offer) -> bool:
        """End the lease; whether it held until now, and with it what was offered."""
        lent = self._lent.pop(offer.id, None)
        if lent is None:
            return False
        good = all(self._arena.blocks.generations[piece.block] == piece.generation for piece in offer.pieces)
        self._end(lent)
        return good

    async def leave(self, turn: Turn) -> None:
        """Compute the prompt no further, and end what was lent for it."""
        for number in [number for number, lent in self._lent.items() if lent.turn == turn.id]:
            self._expire(number)
        order = self._orders.get(turn.id)
        if order is not None:
            self._quit(order)
            await asyncio.wait({order.computing})

    def view(self, number: int, piece: Piece) -> memoryview:
        """The bytes of a block of offer `number`, whatever they are by now; raises `CheckpointError` where they were
        not offered, or are no more."""
        lent = self._lent.get(number)
        if lent is None or piece not in lent.pieces:
            raise CheckpointError("the lease has ended")
        return self._arena.blocks.view(piece.block)

    @property
    def layout(self) -> CacheLayout:
        """That of the caches that are given."""
        return self._sessions.layout

    async def _order(self, turn: Turn, compute: bool, trace: Trace | None, patience_s: float) -> _Order:
        """The order for `turn`, made if need be; one that was left, or for something else, has to end first."""
        while (order := self._orders.get(turn.id)) is None or order.left or order.compute != compute:
            if order is not None:
                if not order.left:
                    self._quit(order)
                await asyncio.wait({order.computing})
                self._forget(order)
            elif trace is None:
                trace = await work(len(turn.prompt.ids) * ID_BYTES, trace_prompt, self._sessions.layout, turn.prompt)
            else:
                computing = self._begin(turn, trace, compute, patience_s)
                self._orders[turn.id] = _Order(turn.id, trace, compute, computing)
        if order.timer is not None:
            order.timer.cancel()
        return order

    def _begin(self, turn: Turn, trace: Trace, compute: bool, patience_s: float) -> asyncio.Future[None]:
        """Compute the prompt in a task, whose failure perhaps nobody asks for; or wait for what is being kept of it."""
        finish = self._finish(turn, trace) if compute else self._sessions.wait_for(trace, patience_s)
        computing = asyncio.ensure_future(finish)
        computing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return computing

    async def _finish(self, turn: Turn, trace: Trace) -> None:
        """Compute the prompt, unless that was done before, until all that it left behind is kept."""
        if self._arena.find_exact(trace, trace.length) is None:
            await self._compute(turn)
            await self._sessions.wait_for(trace, self._lease_s)

    def _conclude(self, order: _Order) -> None:
        """Nothing more is to come; raises if that is because computing failed."""
        if order.computing.cancelled():
            raise CheckpointError("the prompt is computed no further")
        order.computing.result()

    def _time(self, order: _Order) -> None:
        """From now on somebody should ask again in time."""
        if order.timer is not None:
            order.timer.cancel()
        if not order.left:
            order.timer = asyncio.get_running_loop().call_later(self._lease_s, self._quit, order)

    def _quit(self, order: _Order) -> None:
        """Nobody wants the prompt of `order` any more: it ends, and is forgotten then."""
        order.left = True
        order.computing.cancel()
        when_ended(order.computing, lambda: self._forget(order))

    def _forget(self, order: _Order) -> None:
        """Nothing of `order` is under way."""
        if order.timer is not None:
            order.timer.cancel()
        if self._orders.get(order.turn) is order:
            del self._orders[order.turn]

    def _find(self, order: _Order, pages: int) -> Offer | None:
        """An offer of what is kept after the first `pages` pages of the prompt."""
        path = order.path = self._arena.tree.walk(order.trace, order.path)
        last = next((node.host for node in reversed(path) if node.host is not None), None)
        if order.compute:
            point = self._arena.find_exact(order.trace, order.trace.length)
        elif (point := self._find_point(order.trace, path, last)) is None and not self._arena.replay_tokens:
            return None
        if point is not None:
            last = point.page
            pages = min(pages, _shared_pages(last, path))
        if last is not None and last.node.pages > pages + OFFER_PAGES:
            last, point = next(page for page in last.chain() if page.node.pages == pages + OFFER_PAGES), None
        new = point is not None or (last is not None and last.node.pages > pages)
        return self._lend(order, pages, last, point) if new else None

    def _find_point(self, trace: Trace, path: Sequence[Node], last: HostPage | None) -> CommitPoint | None:
        """The commit point that saves `trace` the most, unless its whole pages, up to `last`, save more."""
        match = self._arena.find(path, trace)
        whole = 0 if last is None else min(last.node.pages, (trace.length - 1) // trace.page_tokens)
        replayed = whole * trace.page_tokens - self._arena.replay_tokens if self._arena.replay_tokens else 0
        return match.point if match is not None and match.length >= replayed else None

    def _lend(
        self, order: _Order, pages: int, last: HostPage | None, point: CommitPoint | None
    ) -> Offer:  # fmt: skip
        """Offer the pages up to `last`, and `point`, under a new lease."""
        trace = order.trace
        number = next(self._numbers)
        lease = self._arena.lease(last, point)
        timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire, number)
        chain = list(islice(last.chain(), max(0, last.node.pages - pages)))[::-1] if last is not None else []
        size = trace.page_tokens
        start, stop = pages * size, (pages + len(chain)) * size
        ids = b"".join(page.node.content[: size * ID_BYTES] for page in chain)
        key = chain[-1].node.digest if chain else trace.chain[pages]
        offer = Offer(
            id=number, head=trace.head, ids=ids, extent=Extent(key=key, start=start, stop=stop, source="peer"),
            pages=self._pieces([page.block for page in chain]), checksums=tuple(page.checksum for page in chain),
            point=None if point is None else point.head,
            tail=None if point is None or point.tail is None else self._pieces([point.tail])[0],
            payload=() if point is None else self._pieces(point.blocks),
            checksum=b"" if point is None else point.checksum, ttl_s=self._lease_s,
        )  # fmt: skip
        self._lent[number] = _Lent(order.turn, lease, timer, frozenset(offer.pieces))
        return offer

    def _pieces(self, blocks: Sequence[int]) -> tuple[Piece, ...]:
        """Blocks with their generations."""
        return tuple(Piece(block, self._arena.blocks.generations[block]) for block in blocks)

    def _copy(self, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """Copy, whatever the blocks hold by now; in a thread."""
        for piece, view in zip(pieces, into, strict=True):
            view[:] = self._arena.blocks.view(piece.block)[: len(view)]

    def _expire(self, number: int) -> None:
        """The time of a lease is over. What is still reading finds out when it asks."""
        if (lent := self._lent.pop(number, None)) is not None:
            self.fence(number)
            self._end(lent)

    def _end(self, lent: _Lent) -> None:
        """Return a lease."""
        lent.timer.cancel()
        self._arena.release(lent.lease)


def _shared_pages(last: HostPage | None, path: Sequence[Node]) -> int:
    """How many of the pages up to `last` are those of `path`, which begins with its root."""
    for page in last.chain() if last is not None else ():
        if page.node.pages < len(path) and path[page.node.pages] is page.node:
            return page.node.pages
    return 0

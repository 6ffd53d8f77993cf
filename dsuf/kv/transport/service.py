"""What one peer may ask of this node, over one connection, and what it holds here."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from dsuf.errors import CheckpointError, PeerError
from dsuf.kv.calls import work
from dsuf.kv.giver import LocalGiver
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.trace import Trace
from dsuf.kv.transport.mover import Owner
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
    trace_order,
    unpack_turn,
)
from dsuf.types import Turn

MOST_TURNS = 1024
"""Turns that one peer may ask for at a time."""

MOST_PATIENCE_S = 30.0
"""Longest time for which a peer can have this node wait for what it is about to keep."""

Invited = Callable[[Turn], Awaitable[bool]]
"""Asked to take what a peer keeps of a turn's prompt: whether it will."""


class _Asked:
    """A turn that the peer asks for, once it is read: with its tokens where it is to be computed, else with its trace.
    When it was asked for last, and how many of its questions are under way."""

    def __init__(self) -> None:
        self.turn: Turn | None = None
        self.trace: Trace | None = None
        self.last_s = 0.0
        self.busy = 0


class GiverService:
    """Gives what `giver` has to one peer. `prefix` makes its turns' names its own. `owner` lets it read by itself where
    that is agreed. Everything ends with `close`."""

    def __init__(
        self, giver: LocalGiver, prefix: str, owner: Owner | None, invited: Invited, idle_s: float
    ) -> None:  # fmt: skip
        self._giver, self._prefix, self._owner = giver, prefix, owner
        self._invited, self._idle_s = invited, idle_s
        self._turns: dict[str, _Asked] = {}
        self._offers: dict[int, Offer] = {}

    def counters(self) -> dict[str, int]:
        """What the peer holds: zero when it wants nothing."""
        return {"turns": len(self._turns), "offers": len(self._offers)}

    async def answer(self, body: Question) -> Answer:
        """Do what is asked. Raises `DsufError`."""
        if isinstance(body, Ask):
            return await self._offer(body)
        if isinstance(body, Release):
            offer = self._offers.pop(body.offer, None)
            return Done(offer is not None and await self._giver.release(offer))
        if isinstance(body, Leave):
            await self._leave(body.turn)
            return Done()
        if isinstance(body, Invite):
            size_bytes = len(body.order.ids)
            return Done(await self._invited(await work(size_bytes, unpack_turn, body.order, body.order.rest.id)))
        return self._join(body)

    def view(self, number: int, piece: Piece) -> memoryview:
        """A block of an offer to this peer; raises `CheckpointError` where it is none."""
        if number not in self._offers:
            raise CheckpointError("the lease has ended")
        return self._giver.view(number, piece)

    def fence(self, number: int) -> bool:
        """Before the lease of offer `number` is returned other than by the peer: let it read nothing any more; whether
        it was this peer's."""
        if self._offers.pop(number, None) is None:
            return False
        if self._owner is not None:
            self._owner.close()
        return True

    async def close(self) -> None:
        """The peer has gone: what it holds comes back."""
        leaving = [self._leave(name) for name in list(self._turns)]
        if self._owner is not None:
            self._owner.close()
        await asyncio.gather(*leaving, return_exceptions=True)

    async def _offer(self, body: Ask) -> Answer:
        """`Giver.offer`, for a turn that the peer has sent or sends now."""
        self._forget_idle()
        asked = self._turns.get(body.turn)
        if body.order is None and (asked is None or (body.compute and asked.trace is not None)):
            return Failed("unknown turn", unknown=True)
        if asked is None:
            if len(self._turns) >= MOST_TURNS:
                raise PeerError(f"{MOST_TURNS} turns at a time are enough")
            asked = self._turns[body.turn] = _Asked()
        asked.busy += 1
        try:
            if body.order is not None:
                await self._read(asked, body, body.order)
            if asked.turn is None or self._turns.get(body.turn) is not asked:
                raise PeerError("the turn was left, or is not here yet")
            patience_s = min(max(0.0, body.patience_s), MOST_PATIENCE_S)
            offer = await self._giver.offer(asked.turn, body.pages, body.compute, asked.trace, patience_s)
        finally:
            asked.busy -= 1
            asked.last_s = asyncio.get_running_loop().time()
        if offer is not None:
            self._offers[offer.id] = offer
        if self._turns.get(body.turn) is not asked:  # it was left while it was asked for
            await self._giver.leave(asked.turn)
            raise PeerError("the turn was left")
        return Offered(offer)

    async def _read(self, asked: _Asked, body: Ask, order: Order) -> None:
        """Read a turn that the peer sends; raises `PeerError`."""
        name = self._prefix + body.turn
        if body.compute:
            asked.turn, asked.trace = await work(len(order.ids), unpack_turn, order, name), None
        else:
            asked.trace = await work(len(order.ids), trace_order, self._giver.layout, order)
            asked.turn = msgspec.structs.replace(order.rest, id=name)

    async def _leave(self, name: str) -> None:
        """Nobody wants the turn any more."""
        asked = self._turns.pop(name, None)
        if asked is not None and asked.turn is not None:
            await self._giver.leave(asked.turn)

    def _forget_idle(self) -> None:
        """Forget turns that were not asked for in a long time; what they had here has ended by itself."""
        before_s = asyncio.get_running_loop().time() - self._idle_s
        for name in [name for name, asked in self._turns.items() if not asked.busy and asked.last_s < before_s]:
            del self._turns[name]

    def _join(self, body: Connect | Disconnect) -> Answer:
        """Make or destroy an end of a queue pair."""
        if self._owner is None:
            raise PeerError("nothing can be read here without asking")
        if isinstance(body, Disconnect):
            self._owner.destroy(body.number)
            return Done()
        return Connected(*self._owner.accept(body.end))


async def decline(turn: Turn) -> bool:
    """The answer to every invitation of a node that takes none."""
    return False

"""The way from the queue into the engine: pages first, then a place, then the cache that an earlier turn left behind.

What waits behind the first in line waits too, however small it is, so that the first cannot starve; only a better
priority, or a tenant that holds fewer places, goes before it. The first may take the places and pages of running turns
of worse priority, or of tenants that hold more places than its own; those go back to the head of their line.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from dsuf.errors import EngineFailed, QueueFull, RequestError
from dsuf.kv.sessions import Sessions
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.sched.held import Held
from dsuf.sched.places import Places
from dsuf.sched.preemption import Running, choose_victims
from dsuf.sched.reception import Reception
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Turn

_LOOK_AGAIN_S = 1.0  # in case that room came without a word
_FILLS = 3
"""A turn whose cache could not be filled so often, each time within a deadline, computes all of its prompt."""


class Admission:
    """Lets waiting turns in, one at a time; `run` does it until it is cancelled. While `paused` nobody enters."""

    def __init__(
        self, reception: Reception, places: Places, sessions: Sessions, metrics: Metrics,
        give_way: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.paused = False
        self._reception, self._queue, self._places = reception, reception.queue, places
        self._sessions, self._metrics, self._give_way = sessions, metrics, give_way
        self._news = asyncio.Event()
        self._stuck: Turn | None = None
        self._filling: set[asyncio.Task[None]] = set()

    def poke(self) -> None:
        """A place or pages came free."""
        self._stuck = None
        self._news.set()

    def poke_arrival(self) -> None:
        """The queue changed; if the first in line is still the one that did not fit, that is nothing new."""
        if self._first() is not self._stuck:
            self._news.set()

    def _first(self) -> Turn | None:
        """The turn that is first in line."""
        return self._queue.first(self._places.by_tenant())

    async def run(self) -> None:
        """Let turns in until cancelled; those whose cache is being filled then are left to whoever closes kv."""
        try:
            while True:
                self._news.clear()
                if not await self._admit_first():
                    await self._rest()
        finally:
            for task in self._filling:
                task.cancel()

    async def _rest(self) -> None:
        """Wait for news."""
        try:
            async with asyncio.timeout(None if self._stuck is None else _LOOK_AGAIN_S):
                await self._news.wait()
        except TimeoutError:
            self._stuck = None

    async def _admit_first(self) -> bool:
        """Let the first in line in if that is possible; whether to look at the next one at once."""
        turn = self._first()
        if turn is None or self.paused or turn is self._stuck:
            return False
        if self._places.free <= 0:
            self._make_room(turn, missing_places=1)
            return False
        await self._give_way()
        if not self._queue.holds(turn):
            return True
        ticket = self._reception.tickets[turn.id]
        try:
            limit = 0 if ticket.unfilled >= _FILLS else None
            pages = await self._sessions.admit(turn, limit=limit, peer_from=ticket.peer_from)
        except RequestError as error:
            self._fail_queued(turn, error)
            return True
        if not self._queue.holds(turn) or self.paused:  # it left meanwhile
            if pages is not None:
                self._sessions.release(turn.id)
            return True
        if pages is None:
            self._make_room(turn, missing_places=0)
            return False
        self._enter(turn, pages)
        return True

    def _enter(self, turn: Turn, pages: tuple[int, ...]) -> None:
        """Give `turn` its place, and begin to fill its cache beside the steps of others."""
        ticket = self._reception.tickets[turn.id]
        first = ticket.attached_s is None
        try:
            held = self._places.take(turn, ticket, pages)
        except QueueFull as error:
            if len(self._places):
                self._stuck = turn
            else:  # there is nothing to wait for
                self._fail_queued(turn, error)
            return
        except RequestError as error:
            self._fail_queued(turn, error)
            return
        self._queue.take(turn)
        if first:
            self._metrics.observe_queue(held.attached_s - ticket.submitted_s)
        task = self._places.fill(held)
        self._filling.add(task)
        task.add_done_callback(partial(self._on_filled, ticket))

    def _on_filled(self, ticket: TurnTicket, task: asyncio.Task[None]) -> None:
        """The cache of a turn is filled, or that failed in a way that nobody thought of: then the turn ends."""
        self._filling.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log_event("filling a cache failed", level="error", error=error, turn=ticket.turn.id)
        if not ticket.ended:
            self._reception.fail([ticket], EngineFailed("the server failed to begin this request"))

    def _fail_queued(self, turn: Turn, error: RequestError) -> None:
        """End `turn`, if it still waits."""
        if self._queue.holds(turn):
            self._reception.fail([self._reception.tickets[turn.id]], error)

    def _make_room(self, turn: Turn, *, missing_places: int) -> None:
        """Put running turns back if that lets `turn` in; it waits in any case."""
        self._stuck = turn
        if self._places.leaving:
            return
        running = [
            Running(
                turn=held.turn.id, priority=held.turn.priority, attached_s=held.attached_s,
                own_pages=self._places.count_own_pages(held), tenant=held.turn.tenant,
                movable=self._places.can_put_back(held),
            )
            for held in self._places
        ]  # fmt: skip
        missing_pages = self._sessions.pages_for(turn) - self._sessions.pool.room
        victims = choose_victims(
            running, priority=turn.priority, tenant=turn.tenant, missing_places=missing_places,
            missing_pages=missing_pages,
        )  # fmt: skip
        for name in victims:
            self._preempt(self._places[name], turn)

    def _preempt(self, held: Held, turn: Turn) -> None:
        """Let `held` leave for `turn`."""
        log_event("turn put back", turn=held.turn.id, length=held.length, for_turn=turn.id)
        self._places.put_back(held)

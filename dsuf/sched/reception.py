"""Where turns come in and how they end: who is let into the queue, deadlines, and every turn's ending."""

import asyncio
import copy
import time
from collections.abc import Callable

from dsuf.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, QueueFull, RequestError, Unavailable
from dsuf.kv.sessions import Sessions
from dsuf.observe.metrics import Metrics
from dsuf.sched.endings import continue_turn, record_end
from dsuf.sched.held import Held
from dsuf.sched.intake import Intake, Source
from dsuf.sched.limits import Limits
from dsuf.sched.places import Places
from dsuf.sched.queue import TurnQueue, may_queue, retry_after_s
from dsuf.sched.ticket import TurnTicket
from dsuf.types import EngineFacts, Turn


class Reception:
    """The tickets of all turns whose reader has not come to its end, and the queue of those that wait.

    `trouble` says why the engine counts as not ready, None while all is well. `on_arrival` is called when the queue
    changes, `on_leave` when a turn ends or was read to its end.
    """

    def __init__(
        self, facts: EngineFacts, limits: Limits, metrics: Metrics, sessions: Sessions, places: Places,
        source: Source | None, on_leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self.trouble: str | None = None
        self.queue = TurnQueue()
        self.tickets: dict[str, TurnTicket] = {}
        self.on_arrival: Callable[[], None] = lambda: None
        self._facts, self._limits, self._metrics = facts, limits, metrics
        self._sessions, self._places, self._on_leave = sessions, places, on_leave
        self._intake = None if source is None else Intake(source, sessions.layout.page_tokens, self._enqueue)
        self._refusal: Unavailable | None = None
        self._turn_s = 1.0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Turns that wait for a place, or until their prompt has come from another node."""
        return len(self.queue) + len(self._intake or ())

    def accept(self, turn: Turn) -> TurnTicket:
        """Begin with `turn`: it queues at once, or as soon as its prompt has come from another node. Raises as
        `Submit.submit`, and `InvalidRequest` for a name in use."""
        self._check(turn)
        ticket = TurnTicket(turn, time.monotonic(), self._leave)
        self.tickets[turn.id] = ticket
        self._set_timers(ticket)
        self._empty.clear()
        if self._intake is None or not self._intake.begin(ticket):
            self._enqueue(ticket)
        return ticket

    def refuse(self, error: Unavailable) -> None:
        """From now on answer every turn that comes with `error`; those that are here go on."""
        self._refusal = error

    def put_back(self, held: Held) -> None:
        """A turn left the engine: it waits again, before all of its priority, unless it has ended."""
        ticket = held.ticket
        if ticket.ended:
            self._turn_s += 0.1 * (time.monotonic() - held.attached_s - self._turn_s)
        else:
            if held.leaving == "preempted":
                self._metrics.count_preemption()
            ticket.put_back()
            self.queue.put(continue_turn(ticket), first=True)

    def fail(self, tickets: list[TurnTicket], error: RequestError) -> None:
        """End each of `tickets` with `error`."""
        for ticket in tickets:
            ticket.stop_timers()
            record_end(ticket, type(error).__name__, self._metrics)
            self._dismiss(ticket)
            ticket.fail(copy.copy(error))
        self._on_leave()

    def end_all(self, error: RequestError) -> None:
        """End every turn that is still computed or waiting with `error`."""
        self.fail([ticket for ticket in self.tickets.values() if not ticket.ended], error)

    async def wait_empty(self) -> None:
        """Wait until every turn was read to its end."""
        await self._empty.wait()

    async def close(self) -> None:
        """End every turn, and give up what is on its way from other nodes."""
        self.end_all(Unavailable("the server is stopping", retry_after_s=2))
        if self._intake is not None:
            await self._intake.close()

    def _enqueue(self, ticket: TurnTicket) -> None:
        """Let the turn wait for its place."""
        self.queue.put(ticket.turn)
        self.on_arrival()

    def _check(self, turn: Turn) -> None:
        """Raise what refuses `turn` at once."""
        facts, limits = self._facts, self._limits
        if self._refusal is not None:
            raise copy.copy(self._refusal)  # one exception raised twice would keep both tracebacks
        if self.trouble is not None:
            raise Unavailable("the engine is not ready", retry_after_s=5)
        if not turn.prompt.ids or turn.sampling.max_tokens < 1:
            raise InvalidRequest("a turn needs a prompt and max_tokens of at least 1")
        wanted = len(turn.prompt.ids) + turn.sampling.max_tokens
        if wanted > facts.context_tokens:
            raise ContextTooLong(
                f"maximum context length is {facts.context_tokens} tokens, but the request needs {wanted}: "
                f"{len(turn.prompt.ids)} in the prompt and {turn.sampling.max_tokens} for the answer"
            )
        self._sessions.check(turn)
        if turn.id in self.tickets or turn.id in self._places:
            raise InvalidRequest(f"a request named {turn.id!r} is already running")
        if not may_queue(self.waiting, len(self._places), limit=limits.queue_limit, max_turns=facts.max_turns):
            text = f"as many requests are waiting already as may: {limits.queue_limit}"
            raise QueueFull(text, retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> int:
        """Seconds until it makes sense to come back."""
        return retry_after_s(self.waiting, max_turns=self._facts.max_turns, turn_s=self._turn_s)

    def _set_timers(self, ticket: TurnTicket) -> None:
        """Start the clocks of the turn's deadlines."""
        loop, limits, own_s = asyncio.get_running_loop(), self._limits, ticket.turn.timeout_s
        if limits.queue_timeout_s:
            ticket.timers.append(loop.call_later(limits.queue_timeout_s, self._expire, ticket, True))
        bounds_s = [seconds for seconds in (own_s, limits.turn_timeout_s or None) if seconds is not None]
        if bounds_s:
            ticket.timers.append(loop.call_later(min(bounds_s), self._expire, ticket, False))

    def _expire(self, ticket: TurnTicket, only_queued: bool) -> None:
        """A deadline of `ticket` has passed."""
        age_s = time.monotonic() - ticket.submitted_s
        if only_queued and (ticket.stage != "queued" or ticket.attached_s is not None):
            return
        if not ticket.ended:
            where = "waiting" if ticket.stage == "queued" else ticket.stage
            text = f"no complete answer within {age_s:.3g} s ({where})"
            self.fail([ticket], DeadlineExceeded(text, retry_after_s=self._retry_after_s()))

    def _leave(self, ticket: TurnTicket, reason: str) -> None:
        """The reader left or came to the end. What the engine holds for it goes as soon as it can."""
        ticket.stop_timers()
        if not ticket.ended:
            record_end(ticket, reason, self._metrics)
            self._dismiss(ticket)
        del self.tickets[ticket.turn.id]
        if not self.tickets:
            self._empty.set()
        self._on_leave()

    def _dismiss(self, ticket: TurnTicket) -> None:
        """Take a turn that ends out of the queue or out of further steps."""
        name = ticket.turn.id
        if (held := self._places.get(name)) is not None:
            self._places.dismiss(held, "ended", keep=self.trouble is None)
        elif ticket.stage == "queued" and not (self._intake is not None and self._intake.drop(name)):
            self._sessions.give_up(name)
            self.queue.remove(ticket.turn)
            self.on_arrival()

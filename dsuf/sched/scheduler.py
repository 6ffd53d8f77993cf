"""The loop that owns every turn from submission to its ending, and launches every step."""

import asyncio
import copy
import time
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from dsuf.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
    Unavailable,
)
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Load, Metrics
from dsuf.sched.admission import Admission
from dsuf.sched.audit import Auditor
from dsuf.sched.cost import Shape
from dsuf.sched.endings import continue_turn, record_end
from dsuf.sched.flight import Flight, Launched
from dsuf.sched.held import Held
from dsuf.sched.intake import Intake
from dsuf.sched.places import Places
from dsuf.sched.planner import Planner
from dsuf.sched.policy import Choice, Rules
from dsuf.sched.queue import TurnQueue, may_queue, retry_after_s
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Engine, StepPlan, StepResult, Turn

_FAREWELL_S = 1.0  # for the steps under way when the scheduler is stopped
_PROBE = Choice(plan=StepPlan(), shape=Shape(), expected_s=0.0, balances_s={})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a scheduler: turns that wait, positions a chunk, drafts a step, the gap between a stream's tokens that
    prompts of others may cause, seconds a step, seconds between probes of an idle engine, failing steps in a row that
    make it not ready; how long a turn may wait for a place, and take in all
    (0: for ever); which share of greedy turns with drafts is computed again without, in idle time;
    and whether whole turns are computed here."""

    queue_limit: int = 64
    chunk_tokens: int = 256
    drafts: int = 0
    gap_s: float = 0.5
    step_deadline_s: float = 60.0
    probe_s: float = 5.0
    failing_steps: int = 3
    queue_timeout_s: float = 0.0
    turn_timeout_s: float = 0.0
    audit_share: float = 0.0
    role: Literal["both", "prefill", "decode"] = "both"


class Scheduler:
    """Implements `Submit`. All methods run on the event loop; `run` is started once, and ends when cancelled.

    `trouble` says why the engine counts as not ready, None while all is well. `progressed_s` is the monotonic time when
    a step or an idle probe last came back. `steps` counts them.
    """

    def __init__(
        self, engine: Engine, limits: Limits, metrics: Metrics, sessions: Sessions, taker: Taker | None = None
    ) -> None:  # fmt: skip
        self.trouble: str | None = None
        self.progressed_s = time.monotonic()
        self.steps = 0
        self._engine, self._limits, self._metrics, self._sessions = engine, limits, metrics, sessions
        self._queue = TurnQueue()
        self._tickets: dict[str, TurnTicket] = {}  # every turn whose reader has not come to its end
        self._places = Places(engine, sessions, limits.chunk_tokens, self._poke)
        self._flight = Flight(engine, self._poke)
        self._planner = Planner(
            Rules(
                chunk_tokens=limits.chunk_tokens, gap_s=limits.gap_s, drafts=limits.drafts,
                replay_tokens=engine.layout.replay_tokens,
            )
        )  # fmt: skip
        self._auditor = Auditor(
            engine, sessions, metrics, share=limits.audit_share if limits.drafts else 0.0,
            chunk_tokens=limits.chunk_tokens, is_idle=self._is_idle,
        )  # fmt: skip
        self._admission = Admission(
            self._queue, self._tickets, self._places, sessions, metrics, self._fail, self._auditor.give_way
        )
        self._intake = None if taker is None else Intake(taker, engine.layout.page_tokens, self._enqueue)
        self._refusal: Unavailable | None = None
        self._failing_steps = 0
        self._failure_seen_s = 0.0
        self._turn_s = 1.0
        self._news: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.promise_gap(limits.gap_s)
        sessions.on_room = self._admission.poke

    def submit(self, turn: Turn) -> TurnTicket:
        """Queue `turn`; raises `QueueFull`, `Unavailable`, `ContextTooLong`, or `InvalidRequest` for a name in use."""
        if self._limits.role == "prefill":
            raise Unavailable("this node computes prompts for other nodes and answers nobody itself", retry_after_s=10)
        return self._accept(turn)

    async def prepare(self, turn: Turn) -> None:
        """Compute the prompt of `turn` for another node, and keep piece by piece what a turn there goes on from; raises
        as `submit` and reading do."""
        sampling = msgspec.structs.replace(turn.sampling, max_tokens=1)
        ticket = self._accept(msgspec.structs.replace(turn, id=f"prompt-{turn.id}", sampling=sampling))
        ticket.for_peer = True
        try:
            async for _ in ticket:
                pass
        finally:
            ticket.cancel()

    def _accept(self, turn: Turn) -> TurnTicket:
        """Begin with `turn`: it queues at once, or as soon as its prompt has come from another node."""
        self._check(turn)
        ticket = TurnTicket(turn, time.monotonic(), self._on_leave)
        self._tickets[turn.id] = ticket
        self._set_timers(ticket)
        self._idle.clear()
        if self._intake is None or not self._intake.begin(ticket):
            self._enqueue(ticket)
        return ticket

    def _enqueue(self, ticket: TurnTicket) -> None:
        """Let the turn wait for its place."""
        self._queue.put(ticket.turn)
        self._admission.poke_arrival()

    def refuse(self, error: Unavailable) -> None:
        """From now on answer every submission with `error`; turns that are here go on."""
        self._refusal = error

    def end_all(self, error: RequestError) -> None:
        """End every turn that is still computed or waiting with `error`."""
        self._fail([ticket for ticket in self._tickets.values() if not ticket.ended], error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every turn was read to its end within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def counters(self) -> Mapping[str, int]:
        """Turns that wait, that the engine holds, that its running step names, and that are computed but unread."""
        writing = sum(ticket.stage == "writing" for ticket in self._tickets.values())
        queued = len(self._queue) + len(self._intake or ())
        return {"queued": queued, "attached": len(self._places), "running": self._flight.running, "writing": writing}

    def load(self) -> Load:
        """What the gauges show; the cache in use is pages that turns hold."""
        pool, total = self._sessions.pool, self._engine.layout.pages
        pages = {"used": pool.held, "cached": pool.cached, "free": total - pool.held - pool.cached}
        waiting = {"first": 0, "normal": 0, "last": 0}
        for priority, count in self._queue.count().items():
            waiting["normal" if priority == 0 else "first" if priority < 0 else "last"] += count
        return Load(
            running=len(self._places),
            waiting=len(self._queue),
            waiting_by=waiting,
            pages=pages,
            cache_usage=pool.held / total,
        )

    async def run(self) -> None:
        """Serve until cancelled. Then what is left ends with `Unavailable`, and nothing is attached any more, unless a
        step did not come back: then closing the engine frees it."""
        loop = asyncio.get_running_loop()
        helpers = [asyncio.create_task(work) for work in (self._admission.run(), self._watch(), self._auditor.run())]
        for helper in helpers:
            helper.add_done_callback(lambda _: self._poke())
        try:
            while True:
                self._news = loop.create_future()  # what happens from here on is looked at before the loop rests
                if self._land():
                    await asyncio.sleep(0)  # who has come to a stop string leaves before one more step is launched
                self._retire()
                self._launch()
                for helper in helpers:
                    if helper.done():
                        helper.result()
                await self._news
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._stop()

    async def _stop(self) -> None:
        """End what is left, and detach it as soon as nothing is under way for it; a stuck engine is not waited for."""
        stuck, self.trouble = self.trouble is not None, self.trouble or "scheduler: stopped"
        self.end_all(Unavailable("the server is stopping", retry_after_s=2))
        if self._intake is not None:
            await self._intake.close()
        under_way = self._flight.tasks | {task for held in self._places for task in held.reading}
        if under_way and not stuck:
            await asyncio.wait(under_way, timeout=_FAREWELL_S)
        while self._flight.land() is not None:
            pass
        self._flight.abandon()
        self._places.retire()

    def _poke(self) -> None:
        """Let the loop look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _check(self, turn: Turn) -> None:
        """Raise what refuses `turn` at once."""
        facts, limits = self._engine.facts, self._limits
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
        if turn.id in self._tickets or turn.id in self._places:
            raise InvalidRequest(f"a request named {turn.id!r} is already running")
        waiting = len(self._queue) + len(self._intake or ())
        if not may_queue(waiting, len(self._places), limit=limits.queue_limit, max_turns=facts.max_turns):
            raise QueueFull(f"{waiting} requests are waiting already", retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> int:
        """Seconds until it makes sense to come back."""
        return retry_after_s(len(self._queue), max_turns=self._engine.facts.max_turns, turn_s=self._turn_s)

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
            text = f"no complete answer within {age_s:.1f} s ({where})"
            self._fail([ticket], DeadlineExceeded(text, retry_after_s=self._retry_after_s()))

    def _launch(self) -> None:
        """Give the engine steps, as far as there is something to do and it has not enough of them."""
        while not self._flight.full and self.trouble is None:
            begins_s = self._flight.free_s(time.monotonic())
            choice = self._planner.plan(self._places, begins_s)
            if choice is None:
                return
            self._start(choice, begins_s + choice.expected_s)

    def _start(self, choice: Choice, ends_s: float) -> None:
        """Launch one step, which is expected to end at `ends_s`."""
        giving = [self._places[name] for name in choice.plan.decode]
        others: list[Held] = []
        for part in choice.plan.prefill:
            held = self._places[part.turn]
            held.launched_tokens = part.stop
            (giving if part.stop == held.prompt_tokens else others).append(held)
        for held in giving:
            held.served_s = ends_s
        step = self._flight.launch(choice, giving, others)
        for part in choice.plan.prefill:
            self._places.commit_chunk(part, step.task)

    def _land(self) -> bool:
        """Look at the steps that came back; whether there were any."""
        before = self.steps
        while (landed := self._flight.land()) is not None:
            step, seconds = landed
            self.progressed_s = step.ended_s or 0.0
            self.steps += 1
            try:
                results = step.task.result()
            except (Exception, asyncio.CancelledError) as error:
                self._on_failed_step(step, error)
                continue
            self._failing_steps = 0
            self._set_trouble(None)
            self._planner.observe(step.choice.shape, seconds, self.progressed_s)
            self._metrics.observe_step(seconds)
            self._deliver(results)
        return self.steps > before

    def _deliver(self, results: Iterable[StepResult]) -> None:
        """Hand results to their readers. Results for turns that left meanwhile are normal."""
        for result in results:
            held = self._places.get(result.turn)
            if held is None or held.ticket.ended:
                continue
            ticket = held.ticket
            self._places.advance(held, result.prefilled)
            if result.ids:
                self._time_tokens(held, len(result.ids))
            if result.drafted:
                self._metrics.count_drafts(result.drafted, result.accepted)
            ticket.feed(result)
            if result.finish is not None:
                ticket.stop_timers()
                record_end(ticket, result.finish, self._metrics)
                self._auditor.note(ticket)
                self._places.dismiss(held, "ended", keep=self.trouble is None)

    def _time_tokens(self, held: Held, tokens: int) -> None:
        """Record when `tokens` more came. The first ones after a break say nothing about the gap between tokens."""
        ticket, now_s = held.ticket, self.progressed_s
        if not ticket.ids:
            self._metrics.observe_first_token(now_s - ticket.submitted_s)
        else:
            self._metrics.observe_tokens(tokens, now_s - ticket.latest_s)
        if held.generated_tokens:
            self._metrics.observe_gap(now_s - ticket.latest_s)
        else:
            self._sessions.trust(held.turn.id)
        held.generated_tokens += tokens
        held.served_s = max(held.served_s, now_s) if held.steps_under_way else now_s
        ticket.latest_s = now_s

    def _retire(self) -> None:
        """Detach turns of which nothing is under way any more; those that have not ended wait again."""
        gone = self._places.retire()
        for held in gone:
            ticket = held.ticket
            if ticket.ended:
                self._turn_s += 0.1 * (time.monotonic() - held.attached_s - self._turn_s)
            else:
                ticket.put_back()
                self._queue.put(continue_turn(ticket), first=True)
        if gone:
            self._admission.poke()
            if self._is_idle():
                self._auditor.poke()

    def _is_idle(self) -> bool:
        """Whether nobody wants the engine."""
        return self.trouble is None and not (self._queue or len(self._places) or len(self._flight))

    async def _watch(self) -> None:
        """Look now and then whether a step is over its deadline, and let an idle engine show that it would do one."""
        limits = self._limits
        while True:
            await asyncio.sleep(min(1.0, limits.step_deadline_s / 4, limits.probe_s / 2))
            now_s, since_s = time.monotonic(), self._flight.since_s
            if since_s is not None and now_s - since_s > limits.step_deadline_s:
                self._stall()
            elif not len(self._flight) and now_s - self.progressed_s >= limits.probe_s:
                self._flight.launch(_PROBE, [], [])
            elif self._is_idle():
                self._auditor.poke()

    def _stall(self) -> None:
        """The running step is over its deadline: nobody waits for it any longer, except this loop."""
        if self.trouble is None:
            self._set_trouble(f"engine: no step finished within {self._limits.step_deadline_s:g} s")
            log_event("engine stalled", level="error", step=self.steps, turns=self._flight.running)
            self.end_all(Unavailable("the engine makes no progress", retry_after_s=5))

    def _set_trouble(self, trouble: str | None) -> None:
        """While there is trouble nobody is let in."""
        if trouble != self.trouble:
            self.trouble = trouble
            self._admission.paused = trouble is not None
            self._admission.poke()

    def _on_failed_step(self, step: Launched, error: BaseException) -> None:
        """The engine raised: the turns of the plan are lost, and after several such steps all others are sent away.

        A step that was under way already when the one before it failed counts as the same failure.
        """
        plan = step.plan
        shown = f"prefill {[(part.start, part.stop) for part in plan.prefill]}, decode {len(plan.decode)}"
        log_event("step failed", level="error", error=error, step=self.steps, plan=shown)
        self._metrics.count_failed_step()
        for held in step.named:
            held.failed = True  # also where the reader left meanwhile: nobody may take over what the step left
            self._sessions.blame(held.turn.id)
        reading = [held.ticket for held in step.named if not held.ticket.ended]
        self._fail(reading, EngineFailed("the engine failed while it computed this request"))
        if step.launched_s >= self._failure_seen_s:
            self._failing_steps += 1
        self._failure_seen_s = time.monotonic()
        if self._failing_steps >= self._limits.failing_steps:
            self._set_trouble(f"engine: {self._failing_steps} steps in a row failed")
            self.end_all(Unavailable("the engine is failing", retry_after_s=5))

    def _on_leave(self, ticket: TurnTicket, reason: str) -> None:
        """The reader left or came to the end. What the engine holds for it goes as soon as it can."""
        ticket.stop_timers()
        if not ticket.ended:
            record_end(ticket, reason, self._metrics)
            self._dismiss(ticket)
        del self._tickets[ticket.turn.id]
        if not self._tickets:
            self._idle.set()
        self._poke()

    def _dismiss(self, ticket: TurnTicket) -> None:
        """Take a turn that ends out of the queue or out of further steps."""
        name = ticket.turn.id
        if (held := self._places.get(name)) is not None:
            self._places.dismiss(held, "ended", keep=self.trouble is None)
        elif ticket.stage == "queued" and not (self._intake is not None and self._intake.drop(name)):
            self._queue.remove(ticket.turn)
            self._admission.poke_arrival()

    def _fail(self, tickets: list[TurnTicket], error: RequestError) -> None:
        """End each of `tickets` with `error`."""
        for ticket in tickets:
            ticket.stop_timers()
            self._metrics.fail_turn(type(error).__name__)
            record_end(ticket, type(error).__name__, self._metrics)
            self._dismiss(ticket)
            ticket.fail(copy.copy(error))
        self._poke()

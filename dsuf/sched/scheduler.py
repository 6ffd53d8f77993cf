"""The loop that owns every turn from submission to its ending, and the only caller of the engine."""

import asyncio
import copy
import time
from collections.abc import Iterable, Mapping

import msgspec

from dsuf.errors import (
    ContextTooLong,
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
    Unavailable,
)
from dsuf.kv.commit import is_due
from dsuf.kv.sessions import Sessions
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Load, Metrics
from dsuf.sched.policy import Prefilling, next_plan
from dsuf.sched.queue import TurnQueue, may_queue, retry_after_s
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Engine, StepPlan, StepResult, Turn


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a scheduler: turns that wait, positions a chunk, drafts a step, seconds a step, seconds between probes
    of an idle engine, and failing steps in a row that make it not ready."""

    queue_limit: int = 64
    chunk_tokens: int = 256
    drafts: int = 0
    step_deadline_s: float = 60.0
    probe_s: float = 5.0
    failing_steps: int = 3


class Scheduler:
    """Implements `Submit`. All methods run on the event loop; `run` is started once, and ends when cancelled.

    `trouble` says why the engine counts as not ready, None while all is well. `progressed_s` is the monotonic time when
    a step or an idle probe last came back. `steps` counts them.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics, sessions: Sessions | None = None) -> None:
        self.trouble: str | None = None
        self.progressed_s = time.monotonic()
        self.steps = 0
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._sessions = sessions
        self._queue = TurnQueue()
        self._tickets: dict[str, TurnTicket] = {}  # every turn whose reader has not come to its end
        self._held: dict[str, TurnTicket] = {}  # what the engine holds, oldest first; may have left already
        self._in_flight: frozenset[str] | None = None
        self._crowded = False
        self._refusal: Unavailable | None = None
        self._failing_steps = 0
        self._turn_s = 1.0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, turn: Turn) -> TurnTicket:
        """Queue `turn`; raises `QueueFull`, `Unavailable`, `ContextTooLong`, or `InvalidRequest` for a name in use."""
        self._check(turn)
        ticket = TurnTicket(turn, time.monotonic(), self._on_leave)
        self._tickets[turn.id] = ticket
        self._queue.put(turn)
        self._idle.clear()
        self._wake.set()
        return ticket

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
        """Turns that wait, that the engine holds, that its step in flight carries, and that are computed but unread."""
        writing = sum(ticket.stage == "writing" for ticket in self._tickets.values())
        running = len(self._in_flight or ())
        return {"queued": len(self._queue), "attached": len(self._held), "running": running, "writing": writing}

    def load(self) -> Load:
        """What the gauges show; the cache counts positions against what all turns could have."""
        facts = self._engine.facts
        used = sum(ticket.prefilled_tokens + ticket.generated_tokens for ticket in self._held.values())
        usage = used / (facts.context_tokens * facts.max_turns)
        return Load(running=len(self._held), waiting=len(self._queue), cache_usage=usage)

    async def run(self) -> None:
        """Serve until cancelled. Then what is left ends with `Unavailable`, and nothing is attached any more, unless a
        step did not come back: then closing the engine frees it."""
        try:
            while True:
                self._wake.clear()  # what happens from here on is looked at before the loop rests
                await self._leave_behind()
                self._release()
                await self._admit()
                plan = self._plan()
                if plan.decode or plan.prefill:
                    await self._step(plan)
                else:
                    await self._rest()
        finally:
            self.trouble = self.trouble or "scheduler: stopped"
            self.end_all(Unavailable("the server is stopping", retry_after_s=2))
            if self._in_flight is None:
                self._release()

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
        if turn.id in self._tickets or turn.id in self._held:
            raise InvalidRequest(f"a request named {turn.id!r} is already running")
        if not may_queue(len(self._queue), len(self._held), limit=limits.queue_limit, max_turns=facts.max_turns):
            wait_s = retry_after_s(len(self._queue), max_turns=facts.max_turns, turn_s=self._turn_s)
            raise QueueFull(f"{len(self._queue)} requests are waiting already", retry_after_s=wait_s)

    def _on_leave(self, ticket: TurnTicket, reason: str) -> None:
        """The reader left or came to the end. What the engine holds for it goes with the next release."""
        if ticket.stage == "queued":
            self._queue.remove(ticket.turn)
        if not ticket.ended:
            self._record_end(ticket, reason)
        del self._tickets[ticket.turn.id]
        if not self._tickets:
            self._idle.set()
        self._wake.set()

    def _release(self) -> None:
        """Detach the turns that ended. No step is running."""
        for name in [name for name, ticket in self._held.items() if ticket.ended]:
            ticket = self._held.pop(name)
            self._crowded = False
            self._turn_s += 0.1 * (time.monotonic() - ticket.attached_s - self._turn_s)
            if self._sessions is not None:
                self._sessions.forget(name)
            try:
                self._engine.detach(name)
            except Exception as error:
                log_event("detach failed", level="error", error=error, turn=name)

    async def _admit(self) -> None:
        """Attach waiting turns, in order, as far as the engine has room."""
        while len(self._held) < self._engine.facts.max_turns and not self._crowded:
            turn = self._queue.first()
            if turn is None:
                return
            ticket = self._tickets[turn.id]
            try:
                self._engine.attach(turn)
            except QueueFull as error:
                self._crowded = bool(self._held)  # with nothing held there is nothing to wait for
                if not self._crowded:
                    self._fail([ticket], error)
            except RequestError as error:
                self._fail([ticket], error)
            except Exception as error:
                log_event("attach failed", level="error", error=error, turn=turn.id)
                self._fail([ticket], EngineFailed("the engine failed to begin this request"))
            else:
                self._queue.take()
                await self._hold(ticket)

    async def _hold(self, ticket: TurnTicket) -> None:
        """The engine has accepted `ticket`, which takes over what an earlier turn left behind."""
        ticket.begin(time.monotonic())
        self._held[ticket.turn.id] = ticket
        self._metrics.observe_queue(ticket.attached_s - ticket.submitted_s)
        if self._sessions is not None:
            ticket.take_over(await self._sessions.restore(ticket.turn))

    def _plan(self) -> StepPlan:
        """The next step."""
        held = self._held.items()
        return next_plan(
            [name for name, ticket in held if ticket.stage == "decoding"],
            [
                Prefilling(name, ticket.prefilled_tokens, len(ticket.turn.prompt.ids))
                for name, ticket in held
                if ticket.stage == "prefilling"
            ],
            step=self.steps,
            chunk_tokens=self._limits.chunk_tokens,
            drafts=self._limits.drafts,
        )

    async def _leave_behind(self) -> None:
        """Commit the caches of turns that ended other than by an error. No step is running."""
        for ticket in list(self._held.values()):
            if ticket.ended and not ticket.failed and self.trouble is None:
                await self._commit(ticket, ticket.prefilled_tokens + ticket.generated_tokens)

    async def _commit(self, ticket: TurnTicket, length: int) -> None:
        """Keep the cache of `ticket`, about `length` positions, if that is more than is kept already."""
        if self._sessions is not None and length > ticket.kept_tokens:
            ticket.kept_tokens = length
            await self._sessions.commit(ticket.turn, length)

    async def _commit_chunks(self, plan: StepPlan) -> None:
        """Commit the prompts that `plan` brought to a point where that is due."""
        for part in plan.prefill:
            ticket = self._held.get(part.turn)
            if ticket is None or ticket.ended or ticket.prefilled_tokens != part.stop:
                continue
            chunk, prompt = self._limits.chunk_tokens, len(ticket.turn.prompt.ids)
            if is_due(part.stop, prompt=prompt, kept=ticket.kept_tokens, chunk_tokens=chunk):
                await self._commit(ticket, part.stop)

    async def _rest(self) -> None:
        """Wait for something to do; an empty step now and then shows that the engine would do it."""
        try:
            async with asyncio.timeout(self._limits.probe_s):
                await self._wake.wait()
        except TimeoutError:
            await self._step(StepPlan())

    async def _step(self, plan: StepPlan) -> None:
        """Run one step to its end, however late, and deliver what it gave."""
        started_s = time.monotonic()
        self._in_flight = frozenset((*plan.decode, *(part.turn for part in plan.prefill)))
        step = asyncio.ensure_future(self._engine.step(plan))
        try:
            if not (await asyncio.wait({step}, timeout=self._limits.step_deadline_s))[0]:
                self._stall()
                await asyncio.wait({step})
        except asyncio.CancelledError:
            step.cancel()
            raise
        self._in_flight = None
        self.progressed_s = time.monotonic()
        self.steps += 1
        try:
            results = step.result()
        except (Exception, asyncio.CancelledError) as error:
            self._on_failed_step(plan, error)
            return
        self._failing_steps = 0
        self.trouble = None
        self._metrics.observe_step(self.progressed_s - started_s)
        self._deliver(results)
        await self._commit_chunks(plan)

    def _deliver(self, results: Iterable[StepResult]) -> None:
        """Hand results to their readers. Results for turns that left meanwhile are normal."""
        for result in results:
            ticket = self._held.get(result.turn)
            if ticket is None or ticket.ended:
                continue
            if result.ids:
                self._time_tokens(ticket, len(result.ids))
                if self._sessions is not None:
                    self._sessions.trust(result.turn)
            if result.drafted:
                self._metrics.count_drafts(result.drafted, result.accepted)
            ticket.feed(result)
            if result.finish is not None:
                self._record_end(ticket, result.finish)

    def _time_tokens(self, ticket: TurnTicket, tokens: int) -> None:
        """Record when `tokens` more came."""
        if ticket.generated_tokens == 0:
            self._metrics.observe_first_token(self.progressed_s - ticket.submitted_s)
        else:
            self._metrics.observe_tokens(tokens, self.progressed_s - ticket.latest_s)
        ticket.latest_s = self.progressed_s

    def _stall(self) -> None:
        """The running step is over its deadline: nobody waits for it any longer, except this loop."""
        self.trouble = f"engine: no step finished within {self._limits.step_deadline_s:g} s"
        log_event("engine stalled", level="error", step=self.steps, turns=len(self._in_flight or ()))
        self.end_all(Unavailable("the engine makes no progress", retry_after_s=5))

    def _on_failed_step(self, plan: StepPlan, error: BaseException) -> None:
        """The engine raised: the turns of `plan` are lost, and after several such steps all others are sent away."""
        shown = f"prefill {[(part.start, part.stop) for part in plan.prefill]}, decode {len(plan.decode)}"
        log_event("step failed", level="error", error=error, step=self.steps, plan=shown)
        self._metrics.count_failed_step()
        named = {*plan.decode, *(part.turn for part in plan.prefill)}
        lost = [ticket for name, ticket in self._held.items() if name in named]
        for ticket in lost:
            ticket.failed = True  # also where the reader left meanwhile: nobody may take over what the step left
            if self._sessions is not None:
                self._sessions.blame(ticket.turn.id)
        reading = [ticket for ticket in lost if not ticket.ended]
        self._fail(reading, EngineFailed("the engine failed while it computed this request"))
        self._failing_steps += 1
        if self._failing_steps >= self._limits.failing_steps:
            self.trouble = f"engine: {self._failing_steps} steps in a row failed"
            self.end_all(Unavailable("the engine is failing", retry_after_s=5))

    def _fail(self, tickets: list[TurnTicket], error: RequestError) -> None:
        """End each of `tickets` with `error`."""
        for ticket in tickets:
            if ticket.stage == "queued":
                self._queue.remove(ticket.turn)
            self._metrics.fail_turn(type(error).__name__)
            self._record_end(ticket, type(error).__name__)
            ticket.fail(copy.copy(error))
        self._wake.set()

    def _record_end(self, ticket: TurnTicket, reason: str) -> None:
        """Log and count the ending of a turn."""
        total_s, usage = time.monotonic() - ticket.submitted_s, ticket.usage
        queue_s = total_s if ticket.stage == "queued" else ticket.attached_s - ticket.submitted_s
        if reason in ("stop", "length", "abort"):
            self._metrics.finish_turn(reason, usage, total_s)
        log_event(
            "turn ended",
            turn=ticket.turn.id,
            reason=reason,
            stage=ticket.stage,
            prompt_tokens=len(ticket.turn.prompt.ids),
            completion_tokens=usage.completion_tokens,
            queue_s=round(queue_s, 4),
            total_s=round(total_s, 4),
        )

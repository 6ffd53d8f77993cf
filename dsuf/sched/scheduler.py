"""The loop that owns every turn from submission to its ending, and launches every step."""

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec

from dsuf.errors import EngineFailed, RequestError, Unavailable
from dsuf.kv.sessions import Sessions
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Load, Metrics
from dsuf.sched.admission import Admission
from dsuf.sched.audit import Auditor
from dsuf.sched.cost import Shape
from dsuf.sched.delivery import Delivery
from dsuf.sched.flight import Flight, Launched
from dsuf.sched.held import Held
from dsuf.sched.intake import Source
from dsuf.sched.limits import Limits
from dsuf.sched.outlook import Scene, predict_token_s
from dsuf.sched.places import Places
from dsuf.sched.planner import Planner
from dsuf.sched.policy import Choice, Rules
from dsuf.sched.reception import Reception
from dsuf.sched.recorder import Recorder
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Engine, StepPlan, Turn

__all__ = ["Limits", "Scheduler"]

_FAREWELL_S = 1.0  # for the steps under way when the scheduler is stopped
_CHUNK_SHARE = 0.1  # of the step deadline, for a chunk that no stream waits for
_PROBE = Choice(plan=StepPlan(), shape=Shape(), expected_s=0.0, balances_s={})


class Scheduler:
    """Implements `Submit`. All methods run on the event loop; `run` is started once, and ends when cancelled.

    `trouble` says why the engine counts as not ready, None while all is well. `progressed_s` is the monotonic time when
    a step or an idle probe last came back. `steps` counts them.
    """

    def __init__(
        self, engine: Engine, limits: Limits, metrics: Metrics, sessions: Sessions, source: Source | None = None,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.progressed_s = time.monotonic()
        self.steps = 0
        self.on_delivered: Callable[[], None] = lambda: None
        self._engine, self._limits, self._metrics, self._sessions = engine, limits, metrics, sessions
        self._places = Places(engine, sessions, limits.chunk_tokens, self._poke)
        self._flight = Flight(engine, self._on_landing)
        self._planner = Planner(
            Rules(
                chunk_tokens=limits.chunk_tokens, gap_s=limits.gap_s, drafts=limits.drafts,
                replay_tokens=engine.layout.replay_tokens, most_s=limits.step_deadline_s * _CHUNK_SHARE,
            )
        )  # fmt: skip
        self._auditor = Auditor(
            engine, sessions, metrics, share=limits.audit_share if limits.drafts else 0.0,
            chunk_tokens=limits.chunk_tokens, is_idle=self._is_idle,
        )  # fmt: skip
        self._delivery = Delivery(self._places, sessions, metrics, self._auditor)
        self._reception = Reception(engine.facts, limits, metrics, sessions, self._places, source, self._poke)
        self._admission = Admission(self._reception, self._places, sessions, metrics, self._auditor.give_way)
        self._recorder = recorder
        self._failing_steps = 0
        self._failure_seen_s = 0.0
        self._news: asyncio.Future[None] | None = None  # there is one while the scheduler runs
        self._fault: Exception | None = None
        metrics.promise_gap(limits.gap_s)
        sessions.on_room = self._admission.poke
        self._reception.on_arrival = self._admission.poke_arrival

    @property
    def trouble(self) -> str | None:
        """Why the engine counts as not ready."""
        return self._reception.trouble

    def submit(self, turn: Turn) -> TurnTicket:
        """Queue `turn`; raises `QueueFull`, `Unavailable`, `ContextTooLong`, or `InvalidRequest` for a name in use."""
        if self._limits.role == "prefill":
            raise Unavailable("this node computes prompts for other nodes and answers nobody itself", retry_after_s=10)
        return self._reception.accept(turn)

    async def prepare(self, turn: Turn) -> None:
        """Compute the prompt of `turn` for another node, and keep piece by piece what a turn there goes on from; raises
        as `submit` and reading do."""
        sampling = msgspec.structs.replace(turn.sampling, max_tokens=1)
        turn = msgspec.structs.replace(turn, id=f"prompt-{turn.id}", sampling=sampling, constraint=None)
        ticket = self._reception.accept(turn)
        ticket.for_peer = True
        try:
            async for _ in ticket:
                pass
        finally:
            ticket.cancel()

    def refuse(self, error: Unavailable) -> None:
        """From now on answer every submission with `error`; turns that are here go on."""
        self._reception.refuse(error)

    def end_all(self, error: RequestError) -> None:
        """End every turn that is still computed or waiting with `error`."""
        self._reception.end_all(error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every turn was read to its end within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._reception.wait_empty()
        except TimeoutError:
            return False
        return True

    def counters(self) -> Mapping[str, int]:
        """Turns that wait, that the engine holds, that its running step names, and that are computed but unread."""
        reception, attached = self._reception, len(self._places)
        writing = sum(ticket.stage == "writing" for ticket in reception.tickets.values())
        running = self._flight.running
        return {"queued": reception.waiting, "attached": attached, "running": running, "writing": writing}

    def load(self) -> Load:
        """What the gauges show; the cache in use is pages that turns hold."""
        pool, total = self._sessions.pool, self._engine.layout.pages
        pages = {"used": pool.held, "cached": pool.cached, "free": total - pool.held - pool.cached}
        waiting = {"first": 0, "normal": 0, "last": 0}
        for priority, count in self._reception.queue.count().items():
            waiting["normal" if priority == 0 else "first" if priority < 0 else "last"] += count
        return Load(
            running=len(self._places),
            waiting=self._reception.waiting,
            waiting_by=waiting,
            pages=pages,
            cache_usage=pool.held / total,
        )

    def token_s(self, tokens: int) -> float:
        """Seconds for each token of a prompt of so many that came now; 0 where nothing is known yet."""
        choice, since_s = self._flight.oldest, self._flight.since_s
        here = [held for held in self._places if held.plannable]
        rests = [held.prompt_tokens - held.launched_tokens for held in here]
        under_way = choice is not None and since_s is not None
        scene = Scene(
            rows=sum(not rest for rest in rests), rests=[rest for rest in rests if rest],
            step_tokens=choice.shape.tokens if under_way and choice else 0,
            expected_s=choice.expected_s if under_way and choice else 0.0,
            passed_s=time.monotonic() - since_s if since_s is not None else 0.0,
        )  # fmt: skip
        return predict_token_s(tokens, scene, self._planner.fit.cost, self._planner.rules)

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
                self._go_on()
                for helper in helpers:
                    if helper.done():
                        helper.result()
                await self._news
                if self._fault is not None:
                    raise self._fault
        finally:
            self._news = None
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._stop()

    async def _stop(self) -> None:
        """End what is left, and detach it as soon as nothing is under way for it; a stuck engine is not waited for."""
        stuck = self.trouble is not None
        self._reception.trouble = self.trouble or "scheduler: stopped"
        await self._reception.close()
        under_way = self._flight.tasks | {task for held in self._places for task in held.reading}
        if under_way and not stuck:
            await asyncio.wait(under_way, timeout=_FAREWELL_S)
        self._flight.land()
        self._flight.abandon()
        self._places.retire()

    def _on_landing(self) -> None:
        """A step came back. Where its tokens were taken at once, the next one is launched at once; else readers wake
        first, so that who has come to a stop string leaves before one more step is launched."""
        if self._news is None:
            return
        try:
            if self._land():
                self._go_on()
            else:
                self._poke()
            self.on_delivered()
        except Exception as error:
            self._fault = error
            self._poke()

    def _go_on(self) -> None:
        """Let go who has left, and launch what there is to do."""
        self._retire()
        self._launch()

    def _poke(self) -> None:
        """Let the loop look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _launch(self) -> None:
        """Give the engine steps, as far as there is something to do and it has not enough of them."""
        while not self._flight.full and self._reception.trouble is None:
            begins_s = self._flight.free_s(time.monotonic())
            choice = self._planner.plan(self._places, begins_s)
            if choice is None:
                return
            self._start(choice, begins_s + choice.expected_s)

    def _start(self, choice: Choice, ends_s: float) -> None:
        """Launch one step, which is expected to end at `ends_s`."""
        giving = self._places.named(choice.plan.decode)
        others: list[Held] = []
        for part in choice.plan.prefill:
            held = self._places[part.turn]
            held.launched_tokens = part.stop
            (giving if part.stop == held.prompt_tokens else others).append(held)
        for held in giving:
            held.served_s = ends_s
        if self._recorder is not None:
            self._recorder.note_step(choice.plan)
        step = self._flight.launch(choice, giving, others)
        for part in choice.plan.prefill:
            self._places.commit_chunk(part, step.task)

    def _land(self) -> bool:
        """Look at the steps that came back; whether all that they gave was taken at once."""
        taken = True
        for step, seconds in self._flight.land():
            self.progressed_s = step.ended_s or 0.0
            self.steps += 1
            try:
                results = step.task.result()
            except (Exception, asyncio.CancelledError) as error:
                self._on_failed_step(step, error)
                taken = False
                continue
            self._failing_steps = 0
            if self._reception.trouble is not None:
                self._set_trouble(None)
            self._planner.observe(step.choice, seconds, self.progressed_s)
            self._metrics.observe_step(seconds)
            taken = self._delivery.deliver(results, self.progressed_s) and taken
        return taken

    def _retire(self) -> None:
        """Detach turns of which nothing is under way any more; those that have not ended wait again."""
        gone = self._places.retire()
        for held in gone:
            if self._recorder is not None:
                self._recorder.note_end(held)
            self._reception.put_back(held)
        if gone:
            self._admission.poke()
            if self._is_idle():
                self._auditor.poke()

    def _is_idle(self) -> bool:
        """Whether nobody wants the engine."""
        return self.trouble is None and not (self._reception.queue or len(self._places) or len(self._flight))

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
            self._reception.trouble = trouble
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
        self._reception.fail(reading, EngineFailed("the engine failed while it computed this request"))
        if step.launched_s >= self._failure_seen_s:
            self._failing_steps += 1
        self._failure_seen_s = time.monotonic()
        if self._failing_steps >= self._limits.failing_steps:
            self._set_trouble(f"engine: {self._failing_steps} steps in a row failed")
            self.end_all(Unavailable("the engine is failing", retry_after_s=5))

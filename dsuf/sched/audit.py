"""The speculation audit: some greedy turns that had drafts are computed again without, and their tokens compared.

Drafts must never change an answer. An audit runs while nobody wants the engine, step by step, and gives way as soon as
somebody does; it is tried again later. It has to begin where the turn began: after a replayed prefix, tokens hang on
where that was. One that cannot, since what the turn took over is gone, is skipped.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from dsuf.kv.sessions import Sessions
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Engine, PrefillRange, StepPlan, StepResult, Turn

BACKLOG = 4
ATTEMPTS = 5
SETTLE_S = 0.05  # an engine that was idle for so long is idle


class Case(msgspec.Struct):
    """A turn to compute again: its tokens with drafts, where it began to compute and behind how long a state, and how
    often it was tried."""

    turn: Turn
    ids: list[int]
    start: int
    state_tokens: int
    attempts: int = 0


class _GivenUp(Exception):
    """Somebody wants the engine."""


class Auditor:
    """Audits `share` of the turns that it is told of; `is_idle` says whether nobody wants the engine."""

    def __init__(
        self, engine: Engine, sessions: Sessions, metrics: Metrics, *, share: float, chunk_tokens: int,
        is_idle: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._engine, self._sessions, self._metrics = engine, sessions, metrics
        self._share, self._chunk_tokens, self._is_idle = share, chunk_tokens, is_idle
        self._due = 0.0
        self._backlog: deque[Case] = deque()
        self._news = asyncio.Event()
        self._free = asyncio.Event()  # whether no audit holds a place
        self._free.set()

    def note(self, ticket: TurnTicket) -> None:
        """A turn came to its end; if it was greedy and had drafts, it may be the next to audit.

        One that was put back is not: where its state was not kept, a replayed window stands in the midst of its answer.
        """
        if not ticket.drafted_tokens or ticket.turn.sampling.temperature or ticket.was_put_back:
            return
        self._due += self._share
        if self._due < 1:
            return
        self._due -= 1
        if len(self._backlog) >= BACKLOG:
            self._metrics.count_audit("skipped")
            return
        self._backlog.append(Case(ticket.turn, list(ticket.ids), ticket.source.cached_tokens, ticket.state_tokens))

    def poke(self) -> None:
        """The engine may be idle now."""
        if self._backlog:
            self._news.set()

    async def give_way(self) -> None:
        """Wait until no audit holds a place; nearly always there is none."""
        if not self._free.is_set():
            await self._free.wait()

    async def run(self) -> None:
        """Audit until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(SETTLE_S)
            while self._backlog and self._is_idle():
                await self._try(self._backlog.popleft())

    async def _try(self, case: Case) -> None:
        """Audit one turn; where that has to give way it is tried again, some times."""
        case.attempts += 1
        try:
            self._conclude(case, await self._compute(case))
        except _GivenUp:
            if case.attempts < ATTEMPTS:
                self._backlog.appendleft(case)
            else:
                self._metrics.count_audit("given up")
        except Exception as error:
            self._metrics.count_audit("skipped")
            log_event("audit failed", level="warning", error=error, turn=case.turn.id)

    def _conclude(self, case: Case, ids: list[int] | None) -> None:
        """Compare the tokens with those that the turn had; None where it could not be computed."""
        if ids is None:
            self._metrics.count_audit("skipped")
        elif ids == case.ids:
            self._metrics.count_audit("same")
        else:
            pairs = zip(ids, case.ids, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(case.ids)))
            self._metrics.count_audit("different")
            log_event("drafts changed an answer", level="error", turn=case.turn.id, at_token=place)

    async def _compute(self, case: Case) -> list[int] | None:
        """All tokens without drafts; None where the same beginning is not to be had. Raises `_GivenUp`."""
        turn = msgspec.structs.replace(case.turn, id=f"audit-{case.turn.id}")
        self._free.clear()
        try:
            pages = await self._sessions.admit(turn, limit=case.start)
            if pages is None:
                return None
            try:
                self._engine.attach(turn, pages)
                return await self._run_alone(turn, case)
            except Exception as error:
                if not isinstance(error, _GivenUp):
                    self._sessions.blame(turn.id)
                raise
            finally:
                self._engine.detach(turn.id)
                self._sessions.release(turn.id)
        finally:
            self._free.set()

    async def _run_alone(self, turn: Turn, case: Case) -> list[int] | None:
        """Compute the attached `turn` to its end, a step at a time."""
        restored, start = await self._sessions.restore(turn), case.start
        if restored is None or (restored.start, self._sessions.state_tokens(turn.id)) != (start, case.state_tokens):
            return None
        prompt, ids = len(turn.prompt.ids), list[int]()
        result: StepResult | None = None
        while result is None or result.finish is None:
            if start < prompt:
                stop = min(prompt, start + self._chunk_tokens)
                plan = StepPlan(prefill=(PrefillRange(turn.id, start, stop),))
                start = stop
            else:
                plan = StepPlan(decode=(turn.id,))
            result = await self._step(plan)
            ids += result.ids
        return ids

    async def _step(self, plan: StepPlan) -> StepResult:
        """One step, unless somebody wants the engine. A step that was begun is waited for: it uses the turn's pages."""
        if not self._is_idle():
            raise _GivenUp
        step = asyncio.ensure_future(self._engine.step(plan))
        try:
            return (await asyncio.shield(step))[0]
        except asyncio.CancelledError:
            await asyncio.wait({step}, timeout=1.0)
            raise

"""A schedule played out: scheduler, sessions and toy engine together, watched all the time.

What must hold whatever happens: every turn ends, by its whole answer or by an error that has its reason; tokens are
those of a cold run; nobody reads or writes foreign rows; the sources of a prompt add up; no page and no block is lost.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest.mock import patch

from dsuf.errors import ContextTooLong, DeadlineExceeded, EngineFailed, QueueFull, RequestError, Unavailable
from dsuf.kv.handoff import Giver
from dsuf.sched import admission
from dsuf.sched.scheduler import Limits
from dsuf.sched.ticket import TurnTicket
from dsuf.types import StepResult, Turn, Usage
from tests.toy import make_turn
from tests.turns.clock import run_virtually
from tests.turns.half import METRICS, Half, WatchedEngine
from tests.turns.schedule import Client, Fault, Meddling, Schedule, Visit

STEP_DEADLINE_S = 1.0
STEM_TOKENS = 60


class World:
    """Everything that a schedule needs; `play` it once. `ends` counts what became of turns, and what else occurred."""

    def __init__(self, schedule: Schedule) -> None:
        setting = schedule.setting
        self.schedule, self.rng = schedule, random.Random(schedule.seed)
        self.ends: Counter[str] = Counter()
        self.far = self._make_half("prefill") if setting.hands_over else None
        self.near = self._make_half("decode" if self.far else "both", self.far.giver if self.far else None)
        self.engine, self.sessions, self.scheduler = self.near.engine, self.near.sessions, self.near.scheduler
        self._calls: Counter[str] = Counter()
        self._faults: dict[tuple[str, int], Fault] = {(fault.call, fault.nth): fault for fault in schedule.faults}

    def _make_half(self, role: Literal["both", "prefill", "decode"], giver: Giver | None = None) -> Half:
        """A node."""
        setting, engine = self.schedule.setting, self.make_engine()
        limits = Limits(
            queue_limit=setting.queue_limit, chunk_tokens=setting.chunk_tokens, drafts=setting.drafts, gap_s=0.02,
            step_deadline_s=STEP_DEADLINE_S, probe_s=0.3, failing_steps=2, audit_share=float(setting.audits),
            role=role,
        )  # fmt: skip
        return Half(engine, self.count_blocks(engine), limits, self.before, giver)

    def make_engine(self) -> Any:
        """An engine as the schedule wants it."""
        return WatchedEngine(self.schedule.setting)

    def count_blocks(self, engine: Any) -> int:
        """Blocks of the arena beside `engine`."""
        return self.schedule.setting.blocks

    def cold_tokens(self, turn: Turn) -> list[int]:
        """What `turn` must give."""
        tokens: list[int] = self.engine.cold_tokens(turn)
        return tokens

    def check_tokens(self, turn: Turn, tokens: list[int], whole: bool) -> None:
        """See that `tokens` are those that `turn` must give, or, where it left, the first of them."""
        expected = self.cold_tokens(turn)
        assert tokens == (expected if whole else expected[: len(tokens)]), f"{turn.id}: {tokens} for {expected}"

    def check_gone(self) -> None:
        """What the engine kept of turns that left it is right too."""

    async def play(self) -> Counter[str]:
        """Let everything happen, then see that nothing is left; raises `AssertionError`."""
        schedule = self.schedule
        loops = [asyncio.create_task(half.scheduler.run()) for half in self.halves]
        meddlers = [asyncio.create_task(self._meddle(meddling)) for meddling in schedule.meddlings]
        meddlers += [] if schedule.stops_at_s is None else [asyncio.create_task(self._stop(schedule.stops_at_s, loops))]
        clients = asyncio.gather(*(self._live_through(client) for client in schedule.clients))
        await asyncio.wait([clients, *loops], return_when=asyncio.FIRST_COMPLETED)
        for loop in loops:
            assert not loop.done() or loop.cancelled() or loop.result(), "a loop ended by itself"
        await clients
        await asyncio.gather(*meddlers)
        if not self._stopped_while_stuck:
            await self._come_to_rest()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for half in self.halves:
            await (half.engine.close() if self._stopped_while_stuck else half.close())
        assert METRICS._audits.labels("different")._value.get() == 0, "drafts changed an answer"
        return self.ends

    @property
    def _stopped_while_stuck(self) -> bool:
        """Whether the server may have stopped while a step did not come back: then only closing the engine frees it."""
        schedule = self.schedule
        return schedule.stops_at_s is not None and any(fault.seconds > 1 for fault in schedule.faults)

    @property
    def halves(self) -> list[Half]:
        """The nodes."""
        return [self.near] if self.far is None else [self.far, self.near]

    async def _live_through(self, client: Client) -> None:
        """The turns of a client, one after another."""
        await asyncio.sleep(client.at_s)
        said: list[int] = [client.stem * 200 + 3 + i for i in range(STEM_TOKENS)]
        for number, visit in enumerate(client.visits):
            own = [410 + (7 * client.number + 3 * number + i) % 90 for i in range(visit.own_tokens)]
            prompt = [*said[: visit.kept_tokens], *own] if not number else [*said, *own]
            turn = make_turn(
                f"{client.number}-{number}", prompt, max_tokens=visit.max_tokens, salt=client.salt,
                temperature=visit.temperature, seed=client.number, tenant=client.tenant, priority=client.priority,
                timeout_s=visit.timeout_s,
            )  # fmt: skip
            said = [*prompt, *await self._visit(turn, visit)]
            await asyncio.sleep(visit.pause_s)

    async def _visit(self, turn: Turn, visit: Visit) -> list[int]:
        """Submit `turn`, read it, leave when it is time; its tokens."""
        try:
            ticket = self.scheduler.submit(turn)
        except RequestError as error:
            self._check_error(turn, error)
            return []
        timer = None
        if visit.leaves_after_s is not None:
            timer = asyncio.get_running_loop().call_later(visit.leaves_after_s, ticket.cancel, visit.leaves_by)
        results: list[StepResult] = []
        try:
            async for result in ticket:
                results.append(result)
                if len(results) - 1 == visit.leaves_after_results:
                    ticket.cancel(visit.leaves_by, 0)
        except RequestError as error:
            self._check_error(turn, error)
        finally:
            if timer is not None:
                timer.cancel()
        ticket.cancel()
        return self._check(turn, visit, ticket, results)

    def _check(self, turn: Turn, visit: Visit, ticket: TurnTicket, results: list[StepResult]) -> list[int]:
        """See that what `turn` gave is right; its tokens."""
        tokens = [token for result in results for token in result.ids]
        whole = bool(results) and results[-1].finish is not None
        self.check_tokens(turn, tokens, whole)
        leaves = visit.leaves_after_results is not None or visit.leaves_after_s is not None
        assert whole or leaves or ticket.failed, f"{turn.id} ended without a reason"
        told = [result.usage for result in results if result.usage is not None]
        assert len(told) <= 1 and all(usage is results[0].usage for usage in told), "usage comes first, and once"
        if whole:
            self.ends["whole"] += 1
            self._check_usage(turn, ticket, told[0] if told else None, len(tokens))
        elif not ticket.failed:
            self.ends["left"] += 1
        return tokens

    def _check_usage(self, turn: Turn, ticket: TurnTicket, told: Usage | None, generated: int) -> None:
        """The sources add up to the prompt, to the client as in the record, and are what was and was not computed."""
        prompt = len(turn.prompt.ids)
        usage = ticket.usage
        assert usage.prompt_tokens == prompt and usage.completion_tokens == generated, usage
        cached = 0 if told is None else told.cached_tokens
        assert cached == usage.cached_tokens and (told is None or told.prompt_tokens == prompt), (told, usage)
        if self.engine.attached[turn.id] == 1:
            assert self.engine.computed[turn.id] == usage.computed_tokens, (self.engine.computed[turn.id], usage)
        else:
            self.ends["again"] += 1
        self.ends["device"] += usage.device_tokens > 0
        self.ends["host"] += usage.host_tokens > 0
        self.ends["peer"] += usage.peer_tokens > 0

    def _check_error(self, turn: Turn, error: RequestError) -> None:
        """An error has its reason."""
        self.ends[type(error).__name__] += 1
        broken = any(fault.call == "step" for fault in self.schedule.faults)
        reasons = {
            DeadlineExceeded: turn.timeout_s is not None,
            EngineFailed: broken,
            Unavailable: broken or self.schedule.stops_at_s is not None,
            QueueFull: self.schedule.setting.queue_limit < 100,
            ContextTooLong: self.sessions.pages_for(turn) > self.engine.layout.pages,
        }
        assert reasons.get(type(error)), f"{turn.id}: {error!r}"

    async def _stop(self, at_s: float, loops: Sequence["asyncio.Task[None]"]) -> None:
        """Stop the server; turns that are here end."""
        await asyncio.sleep(at_s)
        self.ends["stopped"] += 1
        for loop in loops[::-1]:
            loop.cancel()
            await asyncio.wait([loop])

    async def _meddle(self, meddling: Meddling) -> None:
        await asyncio.sleep(meddling.at_s)
        if meddling.kind == "flush":
            self.sessions.flush()
        elif meddling.kind == "forget":
            self.sessions.pool.forget_all()
        else:
            self._damage(meddling)

    def _damage(self, meddling: Meddling) -> None:
        """Change a bit of one kept block, or of each, unless somebody reads just now: that is verified already."""
        arena, pick = self.near.arena, meddling.pick
        blocks = [node.host.block for node in arena.tree.nodes() if node.host is not None]
        for point in arena._points:
            blocks += [*point.blocks, *([] if point.tail is None else [point.tail])]
        if not blocks or arena._leases:
            return
        if meddling.kind == "ruin":
            self.sessions.pool.forget_all()
        else:
            blocks = [sorted(blocks)[pick % len(blocks)]]
        for block in blocks:
            view = arena.blocks.view(block)
            view[pick // 7 % len(view)] ^= 1 << pick % 8
        self.ends[meddling.kind] += 1

    def before(self, call: str, engine: Any = None) -> float:
        """Look at the books; the seconds that a call takes, or its failure."""
        for half in self.halves if not call.endswith("close") else ():
            half.look()
        number, self._calls[call] = self._calls[call], self._calls[call] + 1
        fault = self._faults.get((call, number))
        if fault is None:
            return self.rng.random() * self.schedule.setting.unsteady_s
        self.ends[f"{fault.kind} {call}"] += 1
        if fault.kind == "slow":
            return fault.seconds
        if call.endswith("step") and isinstance(engine, WatchedEngine):
            engine.fails = True
            return 0.0
        raise OSError("a fault")

    async def _come_to_rest(self) -> None:
        """Soon after the last turn nothing is in use."""
        for half in self.halves:
            assert await half.scheduler.wait_idle(5.0), half.scheduler.counters()
            await self._be_audited(half)
        for _ in range(2000):  # what was asked of the other node may come late
            if not any(any(half.in_use.values()) for half in self.halves):
                break
            await asyncio.sleep(0.005)
        for half in self.halves:
            assert not any(half.in_use.values()), half.in_use
            half.look()
            assert set(half.engine.counters().values()) == {0}
        self.check_gone()

    async def _be_audited(self, half: Half) -> None:
        """Let what waits for an audit have it; where the server has stopped nothing will."""
        auditor = half.scheduler._auditor
        for _ in range(400 if self.schedule.stops_at_s is None else 0):
            if not auditor._backlog and auditor._free.is_set():
                break
            await asyncio.sleep(0.02)


def play(schedule: Schedule, make_world: Callable[[Schedule], World] = World) -> Counter[str]:
    """Play `schedule` in virtual time; raises `AssertionError`, `Stuck` or what else went wrong."""
    rng = random.Random(schedule.seed + 1)
    unsteady_s = schedule.setting.unsteady_s

    async def main() -> Counter[str]:
        return await make_world(schedule).play()

    with patch.object(admission, "_LOOK_AGAIN_S", 1e6):  # whoever waits is told when there is room
        ends = run_virtually(main, lambda: rng.random() * unsteady_s)
    assert isinstance(ends, Counter)
    return ends


def find_fault(
    schedule: Schedule, total: Counter[str] | None = None, make_world: Callable[[Schedule], World] = World
) -> str | None:
    """How `schedule` goes wrong; None where it does not. What occurred is added to `total`."""
    try:
        ends = play(schedule, make_world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if total is not None:
        total.update(ends)
    return None

"""The scripted engine: the calls of the protocol, one after the other, in the time that the rules say."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import numpy as np

from dsuf.engine_scripted.line import CallLater, Line
from dsuf.engine_scripted.script import NO_RULE, Rule, Script
from dsuf.engine_scripted.turn import I64, ID, PAGE_TOKENS, ScriptedTurn
from dsuf.errors import CheckpointError, ContextTooLong, QueueFull
from dsuf.types import CacheLayout, EngineFacts, SessionState, StepPlan, StepResult, Turn

FINGERPRINT = "scripted-2"
SPARE_TOKENS = 16
STATE_TOKENS = 32
"""The last ids, which a state holds once more beside all of them."""


class ScriptedEngine:
    """Implements `Engine`. Where a real engine's contract forbids a call, this one raises `RuntimeError`.

    `encode` turns reply text into ids (special tokens parsed), `decode` a prompt into text (special tokens spelled).
    There are `pages` pages, or enough for all turns and one more. With `replay_tokens` a prompt can go on from pages
    alone, and has no state before its end.
    """

    def __init__(
        self, script: Script, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str],
        facts: EngineFacts, *, pages: int | None = None, replay_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.facts = facts
        if pages is None:
            pages = (facts.max_turns + 1) * -(-facts.context_tokens // PAGE_TOKENS)
        self.layout = CacheLayout(
            fingerprint=f"{FINGERPRINT}-{replay_tokens}", page_tokens=PAGE_TOKENS,
            page_bytes=PAGE_TOKENS * ID.itemsize, pages=pages, state_bytes=STATE_TOKENS * ID.itemsize,
            replay_tokens=replay_tokens,
        )  # fmt: skip
        self._rows: I64 = np.zeros((pages, PAGE_TOKENS), ID)
        self._script, self._encode, self._decode = script, encode, decode
        self._turns: dict[str, ScriptedTurn] = {}
        self._uses = [0] * len(script.rules)
        self._attached = 0
        self._line = Line()
        self._repeated: StepPlan | None = None  # the latest plan of nothing but plain decoding turns, and its seconds
        self._repeated_s = 0.0

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Hold `turn`; raises `QueueFull` or `ContextTooLong`."""
        progress = ScriptedTurn(turn, self._attached, self._rows, np.array(pages, np.int64))
        if progress.reserved_tokens > self.facts.context_tokens:
            raise ContextTooLong(f"maximum context length is {self.facts.context_tokens} tokens")
        if len(pages) < self.layout.pages_for(progress.reserved_tokens):
            raise ContextTooLong(f"{len(pages)} pages do not hold {progress.reserved_tokens} tokens")
        if len(self._turns) >= self.facts.max_turns:
            raise QueueFull("all places are taken", retry_after_s=1)
        if turn.id in self._turns:
            raise RuntimeError(f"turn {turn.id!r} is attached already")
        self._attached += 1
        self._turns[turn.id] = progress

    def resume(self, turn: str, length: int, state: SessionState | None) -> asyncio.Future[int]:
        """Count `length` positions as prefilled, see `_take_over`; raises `CheckpointError`."""
        return self._line.add(partial(self._take_over, self._turns[turn], length, state))

    def step(self, plan: StepPlan) -> asyncio.Future[list[StepResult]]:
        """Take the time that the rules say, then advance every turn of `plan` that has not ended."""
        return self._line.add(partial(self.run, plan), partial(self._time, plan), about=plan)

    def detach(self, turn: str) -> None:
        """Forget `turn`."""
        if any(isinstance(plan, StepPlan) and turn in _names(plan) for plan in self._line.under_way):
            raise RuntimeError(f"turn {turn!r} is touched while its step runs")
        if (progress := self._turns.pop(turn, None)) is not None:
            progress.write_out()

    def read_state(self, turn: str) -> asyncio.Future[SessionState | None]:
        """The last of the ids whose positions are filled: a real engine has not fed the last token yet."""
        return self._line.add(partial(self._copy_state, self._turns[turn]))

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview]) -> asyncio.Future[None]:
        """Copy pages out."""
        return self._line.add(partial(self._copy_out, pages, into))

    def write_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> asyncio.Future[None]:
        """Copy pages in."""
        return self._line.add(partial(self._copy_in, pages, rows))

    def counters(self) -> Mapping[str, int]:
        """Turns, and positions reserved for them."""
        reserved = sum(progress.reserved_tokens for progress in self._turns.values())
        return {"turns": len(self._turns), "reserved_tokens": reserved}

    async def close(self) -> None:
        """Break off what is under way, which may hang, and forget everything."""
        await self._line.close()
        self._turns.clear()

    def take_time(self, call_later: CallLater) -> None:
        """Let steps take their time by `call_later` and not by the loop's."""
        self._line.call_later = call_later

    def _time(self, plan: StepPlan) -> float | Awaitable[float]:
        """Seconds of a step, which are known at once where no rule wants anything special."""
        if plan is self._repeated:
            return self._repeated_s
        turns = [self._turns[part.turn] for part in plan.prefill] + self._decoding(plan)
        if not all(turn.plain for turn in turns):
            return self._prepare(plan, turns)
        seconds = self._sum_s(plan)
        if not plan.prefill:
            self._repeated, self._repeated_s = plan, seconds
        return seconds

    async def _prepare(self, plan: StepPlan, turns: list[ScriptedTurn]) -> float:
        """Do what rules want of this step before it; then its seconds."""
        for turn in turns:
            if not turn.plain:
                await self._begin(turn)
                turn.steps += 1
        return self._sum_s(plan)

    def _sum_s(self, plan: StepPlan) -> float:
        """Seconds of a step: its prompts one by one, and all its decoding turns at once."""
        parts = [(part, self._turns[part.turn].rule) for part in plan.prefill]
        prefill_s = sum([(part.stop - part.start) * rule.prefill_s_per_token for part, rule in parts])
        return prefill_s + max([turn.rule.step_s for turn in self._decoding(plan)], default=0.0)

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Run `plan` here and now."""
        results = []
        for name in plan.decode:
            if not (turn := self._turns[name]).ended:
                results.append(turn.decode())
                if results[-1].finish is not None:
                    self._repeated = None
        if plan.prefill:
            self._write_out()
            results += [self._turns[part.turn].prefill(part) for part in plan.prefill]
        return results

    def _decoding(self, plan: StepPlan) -> list[ScriptedTurn]:
        """The turns that decode in a step."""
        return [turn for name in plan.decode if not (turn := self._turns[name]).ended]

    def _copy_state(self, progress: ScriptedTurn) -> SessionState | None:
        if self.layout.replay_tokens and progress.length < len(progress.prompt):
            return None
        ids = progress.ids
        return SessionState(
            fingerprint=self.layout.fingerprint, length=len(ids), ids=ids.tobytes(),
            payload=ids[-STATE_TOKENS:].tobytes(), spare=min(SPARE_TOKENS, len(ids)), repeats=True,
        )  # fmt: skip

    def _take_over(self, progress: ScriptedTurn, length: int, state: SessionState | None) -> int:
        """Go on behind `length` positions; raises `CheckpointError` where a state is not of this prompt or engine."""
        if progress.length or not 0 <= length < len(progress.prompt):
            raise CheckpointError(f"turn {progress.turn.id!r} cannot go on behind {length} positions")
        if state is None:
            if length and not self.layout.replay_tokens:
                raise CheckpointError("this engine goes on from a state only")
            progress.kept, progress.length = length, max(0, length - self.layout.replay_tokens)
            return progress.length
        if state.fingerprint != self.layout.fingerprint:
            raise CheckpointError(f"the state is of {state.fingerprint!r}, not of {self.layout.fingerprint!r}")
        ids = np.frombuffer(state.ids, ID)
        if not length <= len(ids) == state.length <= length + SPARE_TOKENS:
            raise CheckpointError(f"a state of {state.length} positions does not fit {length}")
        if not np.array_equal(ids[:length], progress.prompt[:length]):
            raise CheckpointError("the state is of another prompt")
        if state.payload != ids[-STATE_TOKENS:].tobytes():
            raise CheckpointError("the state does not belong to its ids")
        progress.length = length
        return length

    def _write_out(self) -> None:
        """Bring all pages up to date."""
        for turn in self._turns.values():
            turn.write_out()

    def _copy_out(self, pages: Sequence[int], into: Sequence[memoryview]) -> None:
        self._write_out()
        for page, buffer in zip(pages, into, strict=True):
            buffer[:] = memoryview(self._rows[page]).cast("B")

    def _copy_in(self, pages: Sequence[int], rows: Sequence[memoryview]) -> None:
        for page, buffer in zip(pages, rows, strict=True):
            self._rows[page] = np.frombuffer(buffer, ID)

    async def _begin(self, progress: ScriptedTurn) -> None:
        """Find rule and reply where this is the turn's first step, and do what the rule wants of this step."""
        if not progress.steps:
            text = await asyncio.to_thread(self._decode, progress.turn.prompt.ids)
            rule = self._choose(text, progress.number)
            progress.begin(rule, await asyncio.to_thread(self._compose, rule, progress.turn))
        if progress.steps == progress.rule.fail_at_step:
            raise RuntimeError("the script says so")
        if progress.steps == progress.rule.hang_at_step:
            await asyncio.sleep(progress.rule.hang_s)

    def _choose(self, prompt: str, number: int) -> Rule:
        """The first rule that fits."""
        for i, rule in enumerate(self._script.rules):
            spent = rule.times is not None and self._uses[i] >= rule.times
            if not spent and rule.turn in (None, number) and rule.fits(prompt):
                self._uses[i] += 1
                return rule
        return Rule(reasoning="", reply=NO_RULE)

    def _compose(self, rule: Rule, turn: Turn) -> Sequence[int]:
        """The reply's ids."""
        if rule.ids is not None:
            return rule.ids
        thinks = rule.reasoning is not None and turn.prompt.opens_in == "reasoning"
        return self._encode((f"{rule.reasoning}</think>" if thinks else "") + rule.reply)


def _names(plan: StepPlan) -> list[str]:
    """The turns of a plan."""
    return [*(part.turn for part in plan.prefill), *plan.decode]

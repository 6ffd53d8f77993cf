"""A testing tool: an engine that computes nothing and answers from a file (`--engine scripted --script FILE`).

The file is JSON: `{"rules": [{…}, …]}`. The first rule that fits a turn answers it. Fields of a rule, all optional:

    match, absent          text, or a list of texts, that the decoded prompt must hold, or must not hold; the decoded
                           prompt has special tokens spelled out, so "<tool_result>" finds the follow-up of a tool call
    turn                   fits only the turn of this number (from 0, in the order of admission)
    times                  fits only so many turns
    reasoning              text that comes first, with `</think>` after it, where the prompt opens in reasoning
    reply                  text in the model's own markup; special tokens that are spelled out become those tokens
    ids                    token ids to send instead of reasoning and reply
    finish                 "stop" (default), or "length" with the last tokens; max_tokens ends every reply
    tokens_per_step        tokens a decode step (default 1)
    prefill_s_per_token    time that a step takes for each position it prefills
    step_s                 time that a step takes that decodes this turn
    fail_at_step           the turn's step of this number (from 0, prefill included) raises
    hang_at_step, hang_s   the turn's step of this number takes `hang_s` (default: an hour)

Its pages hold the ids of their positions; a prompt is compared with them before it is answered, so wrong pages show.

Imports `types` and `errors`. The tokenizer comes in as two functions.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsuf.errors import CheckpointError, CommandError, ContextTooLong, QueueFull
from dsuf.types import CacheLayout, EngineFacts, Finish, PrefillRange, SessionState, StepPlan, StepResult, Turn

FINGERPRINT = "scripted-2"
PAGE_TOKENS = 128
SPARE_TOKENS = 16
STATE_TOKENS = 32
"""The last ids, which a state holds once more beside all of them."""
NO_RULE = "The script has no rule for this prompt."

_I64 = NDArray[np.int64]
_ID = np.dtype("<i8")
_T = TypeVar("_T")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to answer a turn; the module says what the fields mean."""

    match: str | tuple[str, ...] = ()
    absent: str | tuple[str, ...] = ()
    turn: int | None = None
    times: int | None = None
    reasoning: str | None = None
    reply: str = ""
    ids: tuple[int, ...] | None = None
    finish: Literal["stop", "length"] = "stop"
    tokens_per_step: int = 1
    prefill_s_per_token: float = 0.0
    step_s: float = 0.0
    fail_at_step: int | None = None
    hang_at_step: int | None = None
    hang_s: float = 3600.0


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoded script file."""

    rules: tuple[Rule, ...]


def load_script(path: Path) -> Script:
    """Read a script; raises `CommandError` that says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise CommandError(f"script: cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CommandError(f"script: {path}: {error}") from error


class _Progress:
    """A turn that the engine holds. Rule and reply are found in its first step, which may take the time."""

    def __init__(self, turn: Turn, number: int, rows: _I64, pages: _I64) -> None:
        self.turn, self.number = turn, number
        self.rows, self.pages = rows, pages
        self.prompt: _I64 = np.array(turn.prompt.ids, _ID)
        self.length = 0
        self.kept = 0
        self.sent = 0
        self.steps = 0
        self.ended = False
        self.rule: Rule | None = None
        self.reply: Sequence[int] = ()

    @property
    def reserved_tokens(self) -> int:
        """Positions that the turn can ever need."""
        return len(self.prompt) + self.turn.sampling.max_tokens

    @property
    def ids(self) -> _I64:
        """The ids of all positions that are filled."""
        generated = np.array(self.reply[: max(0, self.length - len(self.prompt))], _ID)
        return np.concatenate([self.prompt[: self.length], generated])

    def prefill(self, part: PrefillRange) -> StepResult:
        """Take in `part`; the end of the prompt gives the first token. Raises `RuntimeError` for wrong pages."""
        if part.start != self.length or not part.start < part.stop <= len(self.prompt):
            raise RuntimeError(f"prefill {part.start} to {part.stop} does not continue at {self.length}")
        self._fill(self.prompt[part.start : part.stop])
        if self.length < len(self.prompt):
            return StepResult(turn=self.turn.id, prefilled=self.length)
        if not np.array_equal(self._held(self.length), self.prompt):
            raise RuntimeError(f"the pages of turn {self.turn.id!r} hold other ids than its prompt")
        return self._send(1)

    def decode(self, tokens: int) -> StepResult:
        """The next `tokens` tokens of the reply, behind whose last one stands an end-of-sentence token."""
        if self.length < len(self.prompt):
            raise RuntimeError("decode before the end of prefill")
        fed = np.array(self.reply[self.length - len(self.prompt) : self.sent], _ID)
        self._fill(fed)  # a real engine feeds a token in the step after it was chosen
        return self._send(tokens)

    def _send(self, tokens: int) -> StepResult:
        ids = tuple(self.reply[self.sent : min(self.sent + tokens, self.turn.sampling.max_tokens)])
        self.sent += len(ids)
        finish = self._finish(len(ids) < tokens)
        self.ended = finish is not None
        return StepResult(turn=self.turn.id, ids=ids, prefilled=len(self.prompt), finish=finish)

    def _finish(self, cut: bool) -> Finish | None:
        """Whether the tokens up to `sent` are the last ones; `cut` says that there were fewer than asked for."""
        if self.sent >= self.turn.sampling.max_tokens:
            return "length"
        if self.rule is not None and self.rule.finish == "length" and self.sent == len(self.reply):
            return "length"
        return "stop" if cut else None

    def _fill(self, ids: _I64) -> None:
        """Write `ids` behind the positions that are filled, except where they were before."""
        written = np.arange(max(self.length, self.kept), self.length + len(ids))
        self.rows[self.pages[written // PAGE_TOKENS], written % PAGE_TOKENS] = ids[len(ids) - len(written) :]
        self.length += len(ids)

    def _held(self, length: int) -> _I64:
        """What the pages hold for the first `length` positions."""
        held: _I64 = self.rows[self.pages[: -(-length // PAGE_TOKENS)]].reshape(-1)[:length]
        return held


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
            page_bytes=PAGE_TOKENS * _ID.itemsize, pages=pages, state_bytes=STATE_TOKENS * _ID.itemsize,
            replay_tokens=replay_tokens,
        )  # fmt: skip
        self._rows: _I64 = np.zeros((pages, PAGE_TOKENS), _ID)
        self._script, self._encode, self._decode = script, encode, decode
        self._turns: dict[str, _Progress] = {}
        self._uses = [0] * len(script.rules)
        self._attached = 0
        self._under_way: Counter[str] = Counter()
        self._calls: set[asyncio.Task[Any]] = set()
        self._order = asyncio.Lock()  # whose waiters go in the order in which they came

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Hold `turn`; raises `QueueFull` or `ContextTooLong`."""
        progress = _Progress(turn, self._attached, self._rows, np.array(pages, np.int64))
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

    def resume(self, turn: str, length: int, state: SessionState | None) -> Coroutine[Any, Any, int]:
        """Count `length` positions as prefilled, see `_take_over`; raises `CheckpointError`."""
        return self._queue(self._take_over, self._turns[turn], length, state)

    def step(self, plan: StepPlan) -> Coroutine[Any, Any, list[StepResult]]:
        """Take the time that the rules say, then advance every turn of `plan` that has not ended."""
        names = Counter(_names(plan))
        self._under_way += names
        return self._queue(self._run, plan, then=lambda: self._under_way.subtract(names))

    def detach(self, turn: str) -> None:
        """Forget `turn`."""
        if self._under_way[turn]:
            raise RuntimeError(f"turn {turn!r} is touched while its step runs")
        self._turns.pop(turn, None)

    def read_state(self, turn: str) -> Coroutine[Any, Any, SessionState | None]:
        """The last of the ids whose positions are filled: a real engine has not fed the last token yet."""
        return self._queue(self._copy_state, self._turns[turn])

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Copy pages out."""
        return self._queue(self._copy_out, pages, into)

    def write_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Copy pages in."""
        return self._queue(self._copy_in, pages, rows)

    def counters(self) -> Mapping[str, int]:
        """Turns, and positions reserved for them."""
        reserved = sum(progress.reserved_tokens for progress in self._turns.values())
        return {"turns": len(self._turns), "reserved_tokens": reserved}

    async def close(self) -> None:
        """Break off what is under way, which may hang, and forget everything."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._turns.clear()

    def _queue(
        self, work: Callable[..., Awaitable[_T]], *arguments: Any, then: Callable[[], None] = lambda: None
    ) -> Coroutine[Any, Any, _T]:
        """Begin a call that waits for those before, and `then` do what ends it; its result is for later."""

        async def follow() -> _T:
            async with self._order:
                return await work(*arguments)

        def end(call: asyncio.Task[_T]) -> None:
            self._calls.discard(call)
            then()

        call = asyncio.ensure_future(follow())
        self._calls.add(call)
        call.add_done_callback(end)
        return _result(call)

    async def _run(self, plan: StepPlan) -> list[StepResult]:
        """One step."""
        going = [name for name in _names(plan) if not self._turns[name].ended]
        for name in going:
            await self._begin(self._turns[name])
        decode = [name for name in plan.decode if name in going]
        await asyncio.sleep(self._duration_s(plan.prefill, decode))
        prefilled = [self._turns[part.turn].prefill(part) for part in plan.prefill]
        return prefilled + [self._turns[name].decode(self._rule(name).tokens_per_step) for name in decode]

    async def _copy_state(self, progress: _Progress) -> SessionState | None:
        if self.layout.replay_tokens and progress.length < len(progress.prompt):
            return None
        ids = progress.ids
        return SessionState(
            fingerprint=self.layout.fingerprint, length=len(ids), ids=ids.tobytes(),
            payload=ids[-STATE_TOKENS:].tobytes(), spare=min(SPARE_TOKENS, len(ids)), repeats=True,
        )  # fmt: skip

    async def _take_over(self, progress: _Progress, length: int, state: SessionState | None) -> int:
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
        ids = np.frombuffer(state.ids, _ID)
        if not length <= len(ids) == state.length <= length + SPARE_TOKENS:
            raise CheckpointError(f"a state of {state.length} positions does not fit {length}")
        if not np.array_equal(ids[:length], progress.prompt[:length]):
            raise CheckpointError("the state is of another prompt")
        if state.payload != ids[-STATE_TOKENS:].tobytes():
            raise CheckpointError("the state does not belong to its ids")
        progress.length = length
        return length

    async def _copy_out(self, pages: Sequence[int], into: Sequence[memoryview]) -> None:
        for page, buffer in zip(pages, into, strict=True):
            buffer[:] = memoryview(self._rows[page]).cast("B")

    async def _copy_in(self, pages: Sequence[int], rows: Sequence[memoryview]) -> None:
        for page, buffer in zip(pages, rows, strict=True):
            self._rows[page] = np.frombuffer(buffer, _ID)

    async def _begin(self, progress: _Progress) -> None:
        """Find rule and reply where this is the turn's first step, and do what the rule wants of this step."""
        if progress.rule is None:
            text = await asyncio.to_thread(self._decode, progress.turn.prompt.ids)
            progress.rule = self._choose(text, progress.number)
            progress.reply = await asyncio.to_thread(self._compose, progress.rule, progress.turn)
        step, progress.steps = progress.steps, progress.steps + 1
        if step == progress.rule.fail_at_step:
            raise RuntimeError("the script says so")
        if step == progress.rule.hang_at_step:
            await asyncio.sleep(progress.rule.hang_s)

    def _choose(self, prompt: str, number: int) -> Rule:
        """The first rule that fits."""
        for i, rule in enumerate(self._script.rules):
            spent = rule.times is not None and self._uses[i] >= rule.times
            if not spent and rule.turn in (None, number) and _fits(rule, prompt):
                self._uses[i] += 1
                return rule
        return Rule(reasoning="", reply=NO_RULE)

    def _compose(self, rule: Rule, turn: Turn) -> Sequence[int]:
        """The reply's ids."""
        if rule.ids is not None:
            return rule.ids
        thinks = rule.reasoning is not None and turn.prompt.opens_in == "reasoning"
        return self._encode((f"{rule.reasoning}</think>" if thinks else "") + rule.reply)

    def _duration_s(self, prefill: Sequence[PrefillRange], decode: Sequence[str]) -> float:
        """How long a step takes: prefill by position, decode by its slowest turn."""
        prefill_s = sum((part.stop - part.start) * self._rule(part.turn).prefill_s_per_token for part in prefill)
        return prefill_s + max((self._rule(name).step_s for name in decode), default=0.0)

    def _rule(self, name: str) -> Rule:
        """The rule of a turn whose first step has begun."""
        return self._turns[name].rule or Rule()


async def _result(call: "asyncio.Task[_T]") -> _T:
    """What a call gives; who gives it up breaks it off."""
    return await call


def _names(plan: StepPlan) -> list[str]:
    """The turns of a plan."""
    return [*(part.turn for part in plan.prefill), *plan.decode]


def _fits(rule: Rule, prompt: str) -> bool:
    """Whether `prompt` holds what `rule` wants and nothing that it excludes."""
    return all(text in prompt for text in _texts(rule.match)) and not any(
        text in prompt for text in _texts(rule.absent)
    )


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """One or several texts as a tuple."""
    return (value,) if isinstance(value, str) else value

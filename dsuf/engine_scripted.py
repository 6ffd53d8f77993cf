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

Imports `types` and `errors`. The tokenizer comes in as two functions.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dsuf.errors import CheckpointError, CommandError, ContextTooLong, QueueFull
from dsuf.types import EngineFacts, Finish, PrefillRange, SessionCache, StepPlan, StepResult, Turn

FINGERPRINT = "scripted"
SPARE_TOKENS = 16
NO_RULE = "The script has no rule for this prompt."


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

    def __init__(self, turn: Turn, number: int) -> None:
        self.turn = turn
        self.number = number
        self.prefilled = 0
        self.sent = 0
        self.steps = 0
        self.rule: Rule | None = None
        self.reply: Sequence[int] = ()

    @property
    def reserved_tokens(self) -> int:
        """Positions that the turn can ever need."""
        return len(self.turn.prompt.ids) + self.turn.sampling.max_tokens

    def prefill(self, part: PrefillRange) -> StepResult:
        """Take in `part`; the end of the prompt gives the first token."""
        if part.start != self.prefilled or not part.start < part.stop <= len(self.turn.prompt.ids):
            raise RuntimeError(f"prefill {part.start} to {part.stop} does not continue at {self.prefilled}")
        self.prefilled = part.stop
        if self.prefilled < len(self.turn.prompt.ids):
            return StepResult(turn=self.turn.id, prefilled=self.prefilled)
        return self.decode(1)

    def decode(self, tokens: int) -> StepResult:
        """The next `tokens` tokens of the reply, behind whose last one stands an end-of-sentence token."""
        if self.prefilled < len(self.turn.prompt.ids):
            raise RuntimeError("decode before the end of prefill")
        limit = self.turn.sampling.max_tokens
        ids = tuple(self.reply[self.sent : min(self.sent + tokens, limit)])
        self.sent += len(ids)
        return StepResult(turn=self.turn.id, ids=ids, prefilled=self.prefilled, finish=self._finish(len(ids) < tokens))

    def _finish(self, cut: bool) -> Finish | None:
        """Whether the tokens up to `sent` are the last ones; `cut` says that there were fewer than asked for."""
        if self.sent >= self.turn.sampling.max_tokens:
            return "length"
        if self.rule is not None and self.rule.finish == "length" and self.sent == len(self.reply):
            return "length"
        return "stop" if cut else None


class ScriptedEngine:
    """Implements `Engine`. Where a real engine's contract forbids a call, this one raises `RuntimeError`.

    `encode` turns reply text into ids (special tokens parsed), `decode` a prompt into text (special tokens spelled).
    """

    def __init__(
        self,
        script: Script,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        facts: EngineFacts,
    ) -> None:
        self.facts = facts
        self.fingerprint = FINGERPRINT
        self._script = script
        self._encode = encode
        self._decode = decode
        self._turns: dict[str, _Progress] = {}
        self._uses = [0] * len(script.rules)
        self._attached = 0
        self._running: frozenset[str] | None = None

    def attach(self, turn: Turn) -> None:
        """Hold `turn`; raises `QueueFull` or `ContextTooLong`."""
        progress = _Progress(turn, self._attached)
        if progress.reserved_tokens > self.facts.context_tokens:
            raise ContextTooLong(f"maximum context length is {self.facts.context_tokens} tokens")
        if len(self._turns) >= self.facts.max_turns:
            raise QueueFull("all places are taken", retry_after_s=1)
        if turn.id in self._turns:
            raise RuntimeError(f"turn {turn.id!r} is attached already")
        self._attached += 1
        self._turns[turn.id] = progress

    async def step(self, plan: StepPlan) -> list[StepResult]:
        """Take the time that the rules say, then advance every turn of `plan`."""
        if self._running is not None:
            raise RuntimeError("a step is running already")
        names = (*(part.turn for part in plan.prefill), *plan.decode)
        self._running = frozenset(names)
        try:
            for name in names:
                await self._begin(self._turns[name])
            await asyncio.sleep(self._duration_s(plan))
            return [*(self._turns[part.turn].prefill(part) for part in plan.prefill), *self._decoded(plan)]
        finally:
            self._running = None

    def detach(self, turn: str) -> None:
        """Forget `turn`."""
        self._refuse_while_running(turn)
        self._turns.pop(turn, None)

    async def export_session(self, turn: str) -> SessionCache:
        """The ids whose positions are filled: a real engine has not fed the last token yet."""
        self._refuse_while_running(turn)
        progress = self._turns[turn]
        fed = progress.reply[: max(0, progress.sent - 1)]
        filled = array("q", [*progress.turn.prompt.ids[: progress.prefilled], *fed])
        return SessionCache(
            fingerprint=FINGERPRINT, length=len(filled), ids=filled.tobytes(), parts={"rows": bytes(len(filled))},
            spare=min(SPARE_TOKENS, len(filled)), repeats=True,
        )  # fmt: skip

    async def import_session(self, turn: str, cache: SessionCache, length: int) -> None:
        """Count `length` positions as prefilled; raises `CheckpointError` where they do not hold the prompt's ids."""
        self._refuse_while_running(turn)
        progress = self._turns[turn]
        if cache.fingerprint != FINGERPRINT:
            raise CheckpointError(f"session cache: fingerprint {cache.fingerprint!r} is not {FINGERPRINT!r}")
        if tuple(array("q", cache.ids)[:length]) != progress.turn.prompt.ids[:length]:
            raise CheckpointError("session cache: holds another prompt")
        progress.prefilled = length

    def counters(self) -> Mapping[str, int]:
        """Turns, and positions reserved for them."""
        reserved = sum(progress.reserved_tokens for progress in self._turns.values())
        return {"turns": len(self._turns), "reserved_tokens": reserved}

    async def close(self) -> None:
        """Forget everything."""
        self._turns.clear()

    def _refuse_while_running(self, turn: str) -> None:
        """Raise if a step with `turn` runs."""
        if turn in (self._running or ()):
            raise RuntimeError(f"turn {turn!r} is touched while its step runs")

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

    def _duration_s(self, plan: StepPlan) -> float:
        """How long the step takes: prefill by position, decode by its slowest turn."""
        prefill_s = sum((part.stop - part.start) * self._rule(part.turn).prefill_s_per_token for part in plan.prefill)
        return prefill_s + max((self._rule(name).step_s for name in plan.decode), default=0.0)

    def _decoded(self, plan: StepPlan) -> list[StepResult]:
        """Results of the decode turns."""
        return [self._turns[name].decode(self._rule(name).tokens_per_step) for name in plan.decode]

    def _rule(self, name: str) -> Rule:
        """The rule of a turn whose first step has begun."""
        return self._turns[name].rule or Rule()


def _fits(rule: Rule, prompt: str) -> bool:
    """Whether `prompt` holds what `rule` wants and nothing that it excludes."""
    return all(text in prompt for text in _texts(rule.match)) and not any(
        text in prompt for text in _texts(rule.absent)
    )


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """One or several texts as a tuple."""
    return (value,) if isinstance(value, str) else value

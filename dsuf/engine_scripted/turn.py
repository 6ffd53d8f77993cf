"""A turn in the scripted engine: how far it is, and its ids in pages."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsuf.engine_scripted.script import Rule
from dsuf.types import Finish, Logprob, PrefillRange, StepResult, Turn

PAGE_TOKENS: Final = 128
ID: Final = np.dtype("<i8")

I64 = NDArray[np.int64]


class ScriptedTurn:
    """A turn that the engine holds. Rule and reply are found in its first step, which may take the time.

    `plain` says that the rule wants nothing special of any step to come.
    """

    def __init__(self, turn: Turn, number: int, rows: I64, pages: I64) -> None:
        self.turn, self.number = turn, number
        self.rows, self.pages = rows, pages
        self.prompt: I64 = np.array(turn.prompt.ids, ID)
        self.name, self.prompt_tokens = turn.id, len(turn.prompt.ids)
        self.length = 0
        self.kept = self.written = 0
        self.sent = 0
        self.most = self.before_end = turn.sampling.max_tokens
        self.steps = 0
        self.ended = False
        self.plain = False
        self.rule = Rule()
        self.reply: tuple[int, ...] = ()

    def begin(self, rule: Rule, reply: Sequence[int]) -> None:
        """Answer by `rule` with `reply`."""
        self.rule, self.reply = rule, tuple(reply)
        self.before_end = min(self.most, len(self.reply))
        self.plain = rule.fail_at_step is None and rule.hang_at_step is None

    @property
    def reserved_tokens(self) -> int:
        """Positions that the turn can ever need."""
        return len(self.prompt) + self.turn.sampling.max_tokens

    @property
    def ids(self) -> I64:
        """The ids of all positions that are filled."""
        generated = np.array(self.reply[: max(0, self.length - len(self.prompt))], ID)
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

    def decode(self) -> StepResult:
        """The next tokens of the reply, behind whose last one stands an end-of-sentence token."""
        if self.length < self.prompt_tokens:
            raise RuntimeError("decode before the end of prefill")
        self.length = self.prompt_tokens + self.sent  # a real engine feeds a token in the step after it was chosen
        return self._send(self.rule.tokens_per_step)

    def write_out(self) -> None:
        """Write the ids of the reply that are fed to the pages: only when somebody is to read them."""
        start = max(self.written, self.prompt_tokens)
        if start >= self.length:
            return
        for page in range(start // PAGE_TOKENS, -(-self.length // PAGE_TOKENS)):
            first, stop = max(start, page * PAGE_TOKENS), min(self.length, (page + 1) * PAGE_TOKENS)
            ids = self.reply[first - self.prompt_tokens : stop - self.prompt_tokens]
            self.rows[self.pages[page], first - page * PAGE_TOKENS : stop - page * PAGE_TOKENS] = ids
        self.written = self.length

    def _send(self, tokens: int) -> StepResult:
        ids = self.reply[self.sent : min(self.sent + tokens, self.most)]
        self.sent += len(ids)
        finish = self._finish(len(ids) < tokens) if self.sent >= self.before_end else None
        self.ended = finish is not None
        rated = () if (top := self.turn.sampling.logprobs) is None else rate(ids, top)
        return StepResult(turn=self.name, ids=ids, prefilled=self.prompt_tokens, logprobs=rated, finish=finish)

    def _finish(self, cut: bool) -> Finish | None:
        """Whether the tokens up to `sent` are the last ones; `cut` says that there were fewer than asked for."""
        if self.sent >= self.most:
            return "length"
        if self.rule.finish == "length" and self.sent == len(self.reply):
            return "length"
        return "stop" if cut else None

    def _fill(self, ids: I64) -> None:
        """Write `ids` behind the positions that are filled, except where they were before."""
        written = np.arange(max(self.length, self.kept), self.length + len(ids))
        self.rows[self.pages[written // PAGE_TOKENS], written % PAGE_TOKENS] = ids[len(ids) - len(written) :]
        self.length += len(ids)

    def _held(self, length: int) -> I64:
        """What the pages hold for the first `length` positions."""
        held: I64 = self.rows[self.pages[: -(-length // PAGE_TOKENS)]].reshape(-1)[:length]
        return held


def rate(ids: Sequence[int], top: int) -> tuple[Logprob, ...]:
    """Log-probabilities as if every token were certain, with the `top` ids from it on, each half as likely again."""
    return tuple((0.0, tuple((token + place, 0.0 - 0.7 * place) for place in range(top))) for token in ids)

"""A submitted turn: what its reader holds, and what the scheduler knows of it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from dsuf.errors import RequestError
from dsuf.types import StepResult, Turn, Usage

Stage = Literal["queued", "prefilling", "decoding", "writing", "gone"]
"""Where a turn is: waiting, in the engine (two stages), computed but not yet read to its end, or over."""


class TurnTicket:
    """The `Ticket` of a turn. The scheduler feeds it and never waits for its reader.

    What is fed and not yet read is bounded by the turn itself: at most a result a token and a chunk. It has one reader.
    """

    def __init__(self, turn: Turn, now_s: float, on_leave: Callable[["TurnTicket", str], None]) -> None:
        self.turn = turn
        self.stage: Stage = "queued"
        self.host_tokens = 0
        self.kept_tokens = 0
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self.submitted_s = now_s
        self.attached_s = now_s
        self.latest_s = now_s
        self.failed = False
        self._prompt_usage: Usage | None = None
        self._used_tokens: int | None = None
        self._told = False
        self._results: deque[StepResult] = deque()
        self._error: RequestError | None = None
        self._news = asyncio.Event()
        self._on_leave = on_leave

    @property
    def ended(self) -> bool:
        """Whether the scheduler will feed nothing more."""
        return self.stage in ("writing", "gone")

    @property
    def usage(self) -> Usage:
        """Tokens of the reply so far; the prompt's are as the first result said, or else computed where not taken over.

        `generated_tokens` can be more: those that the engine made, and holds in its cache.
        """
        computed = self.prefilled_tokens - self.host_tokens
        prompt = self._prompt_usage or Usage(host_tokens=self.host_tokens, computed_tokens=computed)
        used = self.generated_tokens if self._used_tokens is None else self._used_tokens
        return msgspec.structs.replace(prompt, completion_tokens=used)

    def begin(self, now_s: float) -> None:
        """The engine holds the turn."""
        self.stage = "prefilling"
        self.attached_s = self.latest_s = now_s

    def take_over(self, tokens: int) -> None:
        """The engine got the first `tokens` positions of the prompt from a cache in host memory."""
        self.host_tokens = self.kept_tokens = self.prefilled_tokens = tokens

    def feed(self, result: StepResult) -> None:
        """Add a result; one with `finish` is the last."""
        self.prefilled_tokens = max(self.prefilled_tokens, result.prefilled)
        self.generated_tokens += len(result.ids)
        self._prompt_usage = self._prompt_usage or result.usage
        if self.prefilled_tokens >= len(self.turn.prompt.ids):
            self.stage = "decoding"
        if result.finish is not None:
            self.stage = "writing"
        self._results.append(self._with_usage(result))
        self._news.set()

    def _with_usage(self, result: StepResult) -> StepResult:
        """`result` as the reader gets it: the first one says where the prompt came from."""
        if self._told or not self.host_tokens:
            return result
        self._told = True
        computed = len(self.turn.prompt.ids) - self.host_tokens
        return msgspec.structs.replace(result, usage=Usage(host_tokens=self.host_tokens, computed_tokens=computed))

    def fail(self, error: RequestError) -> None:
        """End with `error`, which the reader meets after the results before it."""
        self.stage, self.failed = "writing", True
        self._error = error
        self._news.set()

    def cancel(self, reason: Literal["abort", "stop"] = "abort", used_tokens: int | None = None) -> None:
        """Leave, at any stage; a reader that waits sees the end. Idempotent."""
        if self.stage == "gone":
            return
        self._used_tokens = used_tokens
        self._on_leave(self, reason)
        self.stage = "gone"
        self._results.clear()
        self._news.set()

    def __aiter__(self) -> AsyncIterator[StepResult]:
        return self

    async def __anext__(self) -> StepResult:
        while True:
            if self._results:
                return self._pop()
            if self.stage == "writing" and self._error is not None:
                error, self._error = self._error, None
                self.cancel()
                raise error
            if self.stage == "gone":
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def _pop(self) -> StepResult:
        """The oldest result; after the one that finishes, the turn is over."""
        result = self._results.popleft()
        if result.finish is not None:
            self.cancel()
        return result

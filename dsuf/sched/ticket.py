"""A submitted turn: what its reader holds, and what the scheduler knows of it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal

import msgspec

from dsuf.errors import RequestError
from dsuf.types import StepResult, Times, Turn, Usage

Stage = Literal["queued", "prefilling", "decoding", "writing", "gone"]
"""Where a turn is: waiting, in the engine (two stages), computed but not yet read to its end, or over."""

OVER: Final = ("writing", "gone")
"""Stages of a turn to which the scheduler will feed nothing more."""


class TurnTicket:
    """The `Ticket` of a turn. The scheduler feeds it and never waits for its reader.

    What is fed and not yet read is bounded by the turn itself: at most a result a token and a chunk. It has one reader.
    A turn may be put back and attached again; `ids` are the tokens generated so far, over all its stays in the engine.
    """

    def __init__(self, turn: Turn, now_s: float, on_leave: Callable[["TurnTicket", str], None]) -> None:
        self.turn = turn
        self.stage: Stage = "queued"
        self.prefilled_tokens = 0
        self.ids: list[int] = []
        self.submitted_s = now_s
        self.attached_s: float | None = None
        self.filled_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.finish: str | None = None
        self.latest_s = now_s
        self.failed = False
        self.drafted_tokens = 0
        self.was_put_back = False
        self.unfilled = 0  # how often its cache could not be filled
        self.state_tokens = 0  # of the state that it first went on from
        self.peer_from: int | None = None  # where what another node computed of the prompt begins
        self.for_peer = False  # whether another node waits for the prompt
        self.timers: list[asyncio.TimerHandle] = []
        self._prompt_usage: Usage | None = None
        self._used_tokens: int | None = None
        self._told = False
        self._results: deque[StepResult] = deque()
        self._error: RequestError | None = None
        self._news: asyncio.Future[None] | None = None
        self._take: Callable[[StepResult], bool] | None = None
        self._on_leave = on_leave

    @property
    def ended(self) -> bool:
        """Whether the scheduler will feed nothing more."""
        return self.stage in OVER

    @property
    def times(self) -> Times:
        """When it got how far."""
        return Times(
            submitted_s=self.submitted_s, attached_s=self.attached_s, filled_s=self.filled_s,
            first_token_s=self.first_token_s, ended_s=self.ended_s,
        )  # fmt: skip

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine made."""
        return len(self.ids)

    @property
    def usage(self) -> Usage:
        """Tokens of the reply so far; the prompt's are those taken over, and otherwise those computed until now."""
        prompt = self._prompt_usage or Usage()
        computed = max(0, self.prefilled_tokens - prompt.cached_tokens)
        used = self.generated_tokens if self._used_tokens is None else self._used_tokens
        return msgspec.structs.replace(prompt, computed_tokens=computed, completion_tokens=used)

    @property
    def source(self) -> Usage:
        """Where the prompt came from when the turn first began, as far as it was not computed."""
        return self._prompt_usage or Usage()

    def begin(self, now_s: float) -> None:
        """The engine holds the turn."""
        self.stage = "prefilling" if not self.ids else "decoding"
        self.attached_s = self.attached_s or now_s
        self.latest_s = now_s

    def put_back(self) -> None:
        """The engine holds the turn no longer; it waits again."""
        self.stage = "queued"
        self.was_put_back = True

    def take_over(self, source: Usage, state_tokens: int = 0) -> None:
        """The engine got some positions of the prompt from a cache, behind a state of `state_tokens`; what the first
        stay says is what the client is told."""
        self.filled_s = self.filled_s or time.monotonic()
        if self._prompt_usage is None:
            self._prompt_usage, self.state_tokens = source, state_tokens
            self.prefilled_tokens = source.cached_tokens

    def offer_to(self, take: Callable[[StepResult], bool]) -> None:
        """Offer each result to `take` before a reader has to wake for it."""
        self._take = take

    def feed(self, result: StepResult) -> bool:
        """Add a result; one with `finish` is the last. Whether it was taken at once, so that no reader has to wake.

        Progress with a prompt that was told already is not told again.
        """
        if self.stage == "prefilling":
            self._advance(result.prefilled)
        if result.ids:
            if not self.ids:
                self.first_token_s = time.monotonic()
            self.ids += result.ids
        elif self.ids and result.finish is None:
            return True
        self.drafted_tokens += result.drafted
        if result.finish is not None:
            self.stage, self.ended_s, self.finish = "writing", time.monotonic(), result.finish
        elif not self._results and self._told and self._take is not None and self._take(result):
            return True
        self._results.append(result if self._told else self._with_usage(result))
        self._wake()
        return False

    def _advance(self, prefilled: int) -> None:
        """So many positions are computed: never more than the prompt has, though a turn that was put back computes some
        of its answer as a prompt."""
        prompt = len(self.turn.prompt.ids)
        self.prefilled_tokens = max(self.prefilled_tokens, min(prompt, prefilled))
        if self.prefilled_tokens >= prompt:
            self.stage = "decoding"

    def fail(self, error: RequestError) -> None:
        """End with `error`, which the reader meets after the results before it."""
        self.stage, self.failed = "writing", True
        self.ended_s = self.ended_s or time.monotonic()
        self._error = error
        self._wake()

    def cancel(self, reason: Literal["abort", "stop"] = "abort", used_tokens: int | None = None) -> None:
        """Leave, at any stage; a reader that waits sees the end. Idempotent."""
        if self.stage == "gone":
            return
        self._used_tokens = used_tokens
        self._on_leave(self, reason)
        self.ended_s = self.ended_s or time.monotonic()
        self.stage = "gone"
        self._results.clear()
        self._wake()

    def stop_timers(self) -> None:
        """No deadline matters any more."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

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
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _wake(self) -> None:
        """Let a reader that waits look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _with_usage(self, result: StepResult) -> StepResult:
        """`result` as the reader gets it: the first one says where the prompt came from."""
        self._told = True
        source = self._prompt_usage
        if source is None or not source.cached_tokens:
            return result
        computed = len(self.turn.prompt.ids) - source.cached_tokens
        return msgspec.structs.replace(result, usage=msgspec.structs.replace(source, computed_tokens=computed))

    def _pop(self) -> StepResult:
        """The oldest result; after the one that finishes, the turn is over."""
        result = self._results.popleft()
        if result.finish is not None:
            self.cancel()
        return result

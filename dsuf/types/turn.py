"""A request to generate, from the renderer's prompt to what its reader holds."""

from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

import msgspec

from dsuf.types.constraint import Constraint
from dsuf.types.step import StepResult


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn chooses its tokens; every field is resolved, nothing here is "default".

    `temperature` 0 is greedy (arg-max, lowest id on ties) and ignores the others. `seed` fixes the tokens whatever else
    is in the batch. With `logprobs` each token comes with its log-probability and so many of the likeliest ones.
    """

    temperature: float
    top_p: float
    seed: int
    max_tokens: int
    logprobs: int | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `start` to `stop` (exclusive) of a prompt that hold a picture, with the digest of its content."""

    start: int
    stop: int
    digest: bytes


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered prompt. `opens_in` says where generation starts, as the renderer left it; `salt` separates tenants."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    opens_in: Literal["reasoning", "content", "call"] = "content"
    salt: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request to generate: what the scheduler queues and an engine attaches.

    `tenant` is whom fairness counts it for. Of waiting turns those with a lower `priority` go first. `timeout_s` after
    its submission the turn ends with an error if it has not ended before; None: never. Tokens are chosen among those
    that the `constraint` allows.
    """

    id: str
    prompt: Prompt
    sampling: Sampling
    session: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    constraint: Constraint | None = None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """When a turn got how far, in seconds of the monotonic clock; None where it has not.

    It was submitted, got its place in an engine for the first time, had its cache filled there as far as one was kept,
    gave its first token, and was computed to its end (or failed, or was left).
    """

    submitted_s: float
    attached_s: float | None = None
    filled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None


class Event(msgspec.Struct, frozen=True):
    """One event of a reply in the client's protocol: the SSE event name (None where there is none) and its JSON."""

    name: str | None
    data: str


class Ticket(Protocol):
    """A submitted turn as its reader sees it: an iterator of results; one with `finish` or a `RequestError` ends it."""

    turn: Turn

    @property
    def times(self) -> Times:
        """When it got how far."""

    def __aiter__(self) -> AsyncIterator[StepResult]:
        """Results in order. Results with no ids report prefill progress."""

    def offer_to(self, take: Callable[[StepResult], bool]) -> None:
        """Offer results to `take` from within the scheduler, as soon as they are there: it must not wait, and returns
        whether it took the result. Iteration gives the first result, the last one, those that were not taken, and
        whatever comes while one of these is still to be read."""

    def cancel(self, reason: Literal["abort", "stop"] = "abort", used_tokens: int | None = None) -> None:
        """Leave, at any stage; idempotent. All that the turn holds is freed before the next step but one.

        `reason` is for the record: the client left, or the reply is complete (a stop string); so is `used_tokens`, how
        many of the generated tokens the reply has, where that is not all.
        """


class Submit(Protocol):
    """What `api/` asks of the scheduler. `on_delivered` is called whenever what came of a step has been handed on."""

    on_delivered: Callable[[], None]

    def submit(self, turn: Turn) -> Ticket:
        """Queue a turn; raises `QueueFull`, `Unavailable` or `ContextTooLong` at once."""

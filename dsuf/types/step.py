"""What an engine does in one step, and what came of it."""

from typing import Literal

import msgspec

Finish = Literal["stop", "length"]
"""Why generation ended: the end-of-sentence token, or `max_tokens`."""

Logprob = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and those of the likeliest tokens at its place, by id."""


class PrefillRange(msgspec.Struct, frozen=True):
    """Positions `start` to `stop` (exclusive) of a turn's prompt; the one that ends the prompt also yields a token."""

    turn: str
    start: int
    stop: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does in one step: prefill ranges, decode turns, and how many drafts each decode turn verifies."""

    prefill: tuple[PrefillRange, ...] = ()
    decode: tuple[str, ...] = ()
    drafts: int = 0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did for one turn.

    `ids` are the new tokens, without the end-of-sentence token; `logprobs` has one for each where the turn asks for
    them. Of the drafts `drafted` were verified and `accepted` kept. `prefilled` is the number of prompt positions that
    are now in the cache. `finish` is set with the last tokens of a turn; `fault` comes with it where the turn's
    constraint could not be kept to the end. `usage` comes with a turn's first result where some of the prompt was not
    computed for it; without one, all of it was.
    """

    turn: str
    ids: tuple[int, ...] = ()
    prefilled: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    fault: str | None = None
    usage: "Usage | None" = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by where their cache came from (they add up to the prompt) and generated tokens."""

    device_tokens: int = 0
    host_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this turn."""
        return self.device_tokens + self.host_tokens + self.peer_tokens

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.cached_tokens + self.computed_tokens

"""The protocol of an engine: a loaded model that runs step plans over paged caches."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

import msgspec

from dsuf.types.cache import CacheLayout, SessionState
from dsuf.types.step import StepPlan, StepResult
from dsuf.types.turn import Turn


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the layers above need to know of a loaded engine; a plan may ask it to verify up to `max_drafts` drafts.

    `constrains` says whether it keeps to the constraints of turns, `logprobs` whether it tells of log-probabilities.
    """

    name: str
    device: str
    context_tokens: int
    max_turns: int
    vocabulary: int
    eos_id: int
    max_drafts: int = 0
    constrains: bool = False
    logprobs: bool = False


class Engine(Protocol):
    """A loaded model. No call computes on the event loop.

    Calls take effect in the order in which they are made, even if nobody waits for them any more, so several may be
    under way at once: a step that is launched while another runs works on what that one leaves. What is under way is
    best returned as a future, which needs no task to wait for it. `step` raises only when the engine itself failed:
    every turn in the plan is lost then. A turn that finished in an earlier step yields no result where a later plan
    still names it.

    Pages are the caller's to give out. A turn writes those of its pages that hold positions from its length on, so only
    whole pages before that may be shared. Rows past the positions that were computed mean nothing.
    """

    facts: EngineFacts
    layout: CacheLayout

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Begin `turn` with an empty cache in `pages`, which hold all positions that it can ever need.

        Raises `QueueFull` if no place is free, `ContextTooLong` where the turn does not fit the context or its pages.
        """

    def resume(self, turn: str, length: int, state: SessionState | None) -> Awaitable[int]:
        """Let an attached turn without positions take over the first `length` of its prompt, whose rows are in its
        pages; returns the position at which its first prefill range begins.

        With `state`, whose length is `length` or as many more as it can spare, that is `length`. Without one the last
        `replay_tokens` positions are computed again, but their pages stay as they are. Raises `CheckpointError` if the
        state does not fit; the turn is then as it was.
        """

    def step(self, plan: StepPlan) -> Awaitable[list[StepResult]]:
        """Run one step; one result a turn of the plan that is not finished, in any order."""

    def detach(self, turn: str) -> None:
        """Forget the turn named `turn`; its pages are free. Idempotent; no step that names it is under way."""

    def read_state(self, turn: str) -> Awaitable[SessionState | None]:
        """The state of an attached turn as the steps launched so far leave it; None where it has none, as in the midst
        of a replayed prefill."""

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview]) -> Awaitable[None]:
        """Copy each of `pages` into the buffer of `page_bytes` that stands at its place in `into`."""

    def write_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> Awaitable[None]:
        """Fill each of `pages` with the `page_bytes` at its place in `rows`, which stay as they are until then."""

    def counters(self) -> Mapping[str, int]:
        """What is held for turns now, by name (turns, bytes): all zero when idle."""

    async def close(self) -> None:
        """Wait for the running step, then free everything."""

"""What the next step does: a pure function of which turns the engine holds."""

from collections.abc import Sequence

import msgspec

from dsuf.types import PrefillRange, StepPlan


class Prefilling(msgspec.Struct, frozen=True):
    """A turn whose prompt of `length` positions is in the cache up to `done` (exclusive)."""

    turn: str
    done: int
    length: int


def next_plan(
    decoding: Sequence[str], prefilling: Sequence[Prefilling], *, step: int, chunk_tokens: int, drafts: int = 0
) -> StepPlan:
    """The plan of step number `step`: all of `decoding`, and at most one chunk of one of `prefilling` (oldest first).

    An empty plan means that there is nothing to do. Only a plan that decodes has drafts.
    """
    drafts = drafts if decoding else 0
    chosen = choose_prefill(prefilling, step)
    if chosen is None:
        return StepPlan(decode=tuple(decoding), drafts=drafts)
    stop = min(chosen.length, chosen.done + chunk_tokens)
    part = PrefillRange(chosen.turn, chosen.done, stop)
    return StepPlan(decode=tuple(decoding), prefill=(part,), drafts=drafts)


def choose_prefill(prefilling: Sequence[Prefilling], step: int) -> Prefilling | None:
    """The oldest in even steps, the one with the shortest rest (then the oldest) in odd ones."""
    if not prefilling:
        return None
    return prefilling[0] if step % 2 == 0 else min(prefilling, key=lambda turn: turn.length - turn.done)

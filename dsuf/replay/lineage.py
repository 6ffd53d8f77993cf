"""Which recorded turn can have left the cache that another began with: pure functions of their tokens."""

from collections.abc import Sequence

from dsuf.types import TurnRecord

_ROUND = 32
"""A turn's cache can be some tokens longer than what its reader wanted: rounds that were under way."""


def taken_tokens(record: TurnRecord, replay_tokens: int) -> int:
    """Positions whose rows the turn took over: without a state it computed the last `replay_tokens` of them again."""
    return record.start if record.state_tokens or not record.start else record.start + replay_tokens


def find_makers(record: TurnRecord, records: Sequence[TurnRecord], replay_tokens: int) -> list[TurnRecord]:
    """The turns of `records`, in the order in which they began, that can have left what `record` began with, nearest
    first: they are before it, begin with the tokens that it took over, and came as far as the state that it had."""
    taken = taken_tokens(record, replay_tokens)
    beginning, before = record.prompt[:taken], records[: records.index(record)]
    return [
        maker
        for maker in reversed(before)
        if len(maker.prompt) + len(maker.ids) + _ROUND >= record.state_tokens
        and shared_tokens((*maker.prompt, *maker.ids), beginning) >= min(taken, len(maker.prompt) + len(maker.ids))
        and len(maker.prompt) + len(maker.ids) + 1 >= taken
    ]


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))

"""Turns that wait for an engine, and how many may."""

import math
from collections import OrderedDict

from dsuf.types import Turn


class TurnQueue:
    """First come, first served within a tenant; tenants take turns. Any turn can leave at any moment."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, Turn]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, turn: Turn) -> None:
        """Add `turn` behind the others of its tenant."""
        self._tenants.setdefault(turn.tenant, OrderedDict())[turn.id] = turn
        self._length += 1

    def first(self) -> Turn | None:
        """The turn that is next, still in the queue; None if nothing waits."""
        for turns in self._tenants.values():
            return next(iter(turns.values()))
        return None

    def take(self) -> Turn:
        """Remove and return the turn that is next; its tenant goes behind the other tenants. The queue is not empty."""
        tenant, turns = self._tenants.popitem(last=False)
        _, turn = turns.popitem(last=False)
        if turns:
            self._tenants[tenant] = turns
        self._length -= 1
        return turn

    def remove(self, turn: Turn) -> None:
        """Take `turn` out, wherever it stands. The turn is in the queue."""
        turns = self._tenants[turn.tenant]
        del turns[turn.id]
        if not turns:
            del self._tenants[turn.tenant]
        self._length -= 1


def may_queue(waiting: int, attached: int, *, limit: int, max_turns: int) -> bool:
    """Whether one more turn may wait. Those about to find a free place in the engine do not count against the limit."""
    return waiting - max(0, max_turns - attached) < limit


def retry_after_s(waiting: int, *, max_turns: int, turn_s: float) -> int:
    """Whole seconds (1 to 10) until a place in the queue is likely free, given what a turn takes on average."""
    until_free_s = turn_s * (1 + waiting) / (2 * max_turns)
    return min(10, max(1, math.ceil(until_free_s)))

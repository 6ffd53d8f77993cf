"""Turns that wait for an engine, and how many may."""

import math
from collections import OrderedDict
from collections.abc import Mapping

from dsuf.types import Turn

_Tenants = OrderedDict[str, OrderedDict[str, Turn]]
_NO_PLACES: Mapping[str, int] = {}
_NOBODY: _Tenants = OrderedDict()


class TurnQueue:
    """Better priorities (lower numbers) first; in a priority the tenant that holds fewest places, and those that hold
    alike take turns; of a tenant first come, first served.

    Any turn can leave at any moment.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Tenants] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, turn: Turn, *, first: bool = False) -> None:
        """Add `turn` behind the others of its tenant, or in front of all of its priority: one that was put back."""
        tenants = self._classes.setdefault(turn.priority, OrderedDict())
        turns = tenants.setdefault(turn.tenant, OrderedDict())
        turns[turn.id] = turn
        if first:
            turns.move_to_end(turn.id, last=False)
            tenants.move_to_end(turn.tenant, last=False)
        self._length += 1

    def first(self, places: Mapping[str, int] = _NO_PLACES) -> Turn | None:
        """The turn that is next, still in the queue: in the best priority, of the tenant that holds fewest `places`;
        None if nothing waits."""
        if not self._classes:
            return None
        tenants = self._classes[min(self._classes)]
        tenant = min(tenants, key=lambda name: places.get(name, 0))
        return next(iter(tenants[tenant].values()))

    def holds(self, turn: Turn) -> bool:
        """Whether this very `turn` waits."""
        turns = self._classes.get(turn.priority, _NOBODY).get(turn.tenant)
        return turns is not None and turns.get(turn.id) is turn

    def take(self, turn: Turn) -> None:
        """Take out `turn`, which gets its place; its tenant goes behind the other tenants of its priority."""
        self.remove(turn)
        tenants = self._classes.get(turn.priority, _NOBODY)
        if turn.tenant in tenants:
            tenants.move_to_end(turn.tenant)

    def remove(self, turn: Turn) -> None:
        """Take out `turn`, which leaves, wherever it stands. The turn is in the queue."""
        tenants = self._classes[turn.priority]
        del tenants[turn.tenant][turn.id]
        if not tenants[turn.tenant]:
            del tenants[turn.tenant]
        if not tenants:
            del self._classes[turn.priority]
        self._length -= 1

    def count(self) -> dict[int, int]:
        """How many wait in each priority."""
        return {priority: sum(len(turns) for turns in tenants.values()) for priority, tenants in self._classes.items()}


def may_queue(waiting: int, attached: int, *, limit: int, max_turns: int) -> bool:
    """Whether one more turn may wait. Those about to find a free place in the engine do not count against the limit."""
    return waiting - max(0, max_turns - attached) < limit


def retry_after_s(waiting: int, *, max_turns: int, turn_s: float) -> int:
    """Whole seconds (1 to 10) until a place in the queue is likely free, given what a turn takes on average."""
    until_free_s = turn_s * (1 + waiting) / (2 * max_turns)
    return min(10, max(1, math.ceil(until_free_s)))

"""Which running turns are put back so that another one can run: a pure function."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that the engine holds: its priority and tenant, when it was attached, the pages that only it holds, and
    whether it can be put back."""

    turn: str
    priority: int
    attached_s: float
    own_pages: int
    tenant: str = ""
    movable: bool = True


def choose_victims(
    running: Sequence[Running], *, priority: int, tenant: str, missing_places: int, missing_pages: int
) -> tuple[str, ...]:
    """The turns to put back for a waiting one of `priority` and `tenant`: none without need, and none if all that may
    be put back would not make enough room.

    Those of a worse priority may be, the worst first, of it the latest to come; then those of the same priority of
    tenants that hold more places than `tenant` even after the exchange, of the tenant that holds most.
    """
    victims: list[Running] = []

    def enough(chosen: Sequence[Running]) -> bool:
        return len(chosen) >= missing_places and sum(turn.own_pages for turn in chosen) >= missing_pages

    left = list(running)
    while not enough(victims):
        victim = _choose_next(left, priority, tenant)
        if victim is None:
            return ()
        left.remove(victim)
        victims.append(victim)
    while (less := _leave_one_out(running, victims, enough, priority, tenant)) is not None:
        victims = less
    return tuple(turn.turn for turn in victims)


def _choose_next(running: Sequence[Running], priority: int, tenant: str) -> Running | None:
    """The first of those that may be put back."""
    worse = [turn for turn in running if turn.movable and turn.priority > priority]
    if worse:
        return max(worse, key=lambda turn: (turn.priority, turn.attached_s))
    places = Counter(turn.tenant for turn in running)
    rich = [
        turn
        for turn in running
        if turn.movable
        and turn.priority == priority
        and turn.tenant != tenant
        and places[turn.tenant] - 1 > places[tenant]
    ]
    return max(rich, key=lambda turn: (places[turn.tenant], turn.attached_s), default=None)


def _leave_one_out(
    running: Sequence[Running],
    victims: Sequence[Running],
    enough: Callable[[Sequence[Running]], bool],
    priority: int,
    tenant: str,
) -> list[Running] | None:
    """`victims` less the latest that is not needed: one with many pages may make those chosen before it needless."""
    for turn in reversed(victims):
        rest = [other for other in victims if other is not turn]
        if rest and enough(rest) and _is_fair(running, rest, priority, tenant):
            return rest
    return None


def _is_fair(running: Sequence[Running], victims: Sequence[Running], priority: int, tenant: str) -> bool:
    """Whether each tenant that loses turns of the same priority still holds more places than `tenant` without them: a
    worse turn of `tenant` that stays after all counts as one of its places again."""
    lost = {turn.turn for turn in victims}
    places = Counter(turn.tenant for turn in running if turn.turn not in lost)
    return all(turn.priority > priority or places[turn.tenant] > places[tenant] for turn in victims)

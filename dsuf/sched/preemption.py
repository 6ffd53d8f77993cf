"""Which running turns are put back so that one of better priority can run: a pure function."""

from collections.abc import Sequence

import msgspec


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that the engine holds: its priority, when it was attached, and the pages that only it holds."""

    turn: str
    priority: int
    attached_s: float
    own_pages: int


def choose_victims(
    running: Sequence[Running], *, priority: int, missing_places: int, missing_pages: int
) -> tuple[str, ...]:
    """The turns to put back for a waiting one of `priority`: the worst priority first, of it the latest to come.

    Only turns of a worse priority are put back, none without need, and none if all together would not make enough room.
    """
    worse = sorted(
        (turn for turn in running if turn.priority > priority),
        key=lambda turn: (turn.priority, turn.attached_s),
        reverse=True,
    )
    victims: list[Running] = []

    def enough(chosen: Sequence[Running]) -> bool:
        return len(chosen) >= missing_places and sum(turn.own_pages for turn in chosen) >= missing_pages

    for turn in worse:
        if not enough(victims):
            victims.append(turn)
    if not enough(victims):
        return ()
    for turn in reversed(victims):  # one with many pages may make others, chosen before it, needless
        rest = [other for other in victims if other is not turn]
        victims = rest if rest and enough(rest) else victims
    return tuple(turn.turn for turn in victims)

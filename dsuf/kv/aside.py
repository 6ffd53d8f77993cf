"""States of turns that were put back: what each goes on from stays until it does."""

from dsuf.kv.arena import Arena
from dsuf.kv.claims import Lease
from dsuf.kv.point import CommitPoint


class Aside:
    """At most one commit point a turn, by the turn's name, under a lease that dropping what is kept leaves alone."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._leases: dict[str, Lease] = {}

    def put(self, turn: str, point: CommitPoint | None) -> bool:
        """Hold on to `point`, instead of what was held for `turn`; whether that is to be found."""
        if point is None or point.state != "ready":
            return False
        lease = self._arena.lease(point.page, point, firm=True)
        self.give_up(turn)
        self._leases[turn] = lease
        return True

    def give_up(self, turn: str) -> None:
        """`turn` goes on, or will not; idempotent."""
        if (lease := self._leases.pop(turn, None)) is not None:
            self._arena.release(lease)

    def clear(self) -> None:
        """No turn will go on."""
        for turn in list(self._leases):
            self.give_up(turn)

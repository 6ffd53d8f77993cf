"""A turn's mask as steps use it: followed by what the device says of the turn, not by what the host has heard of it."""

from collections.abc import Sequence
from concurrent.futures import Future

from dsuf.types import Allowed, Mask, Turn


class Masking:
    """The mask of one turn; the prompt's last tokens may be under it already."""

    def __init__(self, mask: Mask, turn: Turn, spent: int) -> None:
        ids = turn.prompt.ids
        self._mask, self._known = mask, len(ids)
        self._taken = list(ids[len(ids) - spent :])
        self._fault: tuple[int, str | None] = 0, None

    def follow(self, length: int, last: Sequence[int]) -> None:
        """The turn has come to position `length`, whose token is the last of `last`.

        Raises `RuntimeError` where these are fewer than are new.
        """
        new = length + 1 - self._known
        if new > len(last):
            raise RuntimeError(f"a turn is {new} tokens ahead of its mask")
        self._taken += last[len(last) - new :] if new > 0 else ()
        self._known = max(self._known, length + 1)

    def ask(self, drafts: Sequence[int] = ()) -> "Future[Allowed]":
        """Begin to find out what may come behind 0, 1, … of `drafts`."""
        taken, self._taken = self._taken, []
        return self._mask.ask(taken, drafts)

    def note(self, allowed: Allowed) -> None:
        """What was last asked was answered with `allowed`."""
        self._fault = len(allowed.rows) - 1, allowed.fault

    def find_fault(self, given: int) -> str | None:
        """Why the turn had to end, if it did, behind `given` of the drafts that were last asked about."""
        place, fault = self._fault
        return fault if given == place else None

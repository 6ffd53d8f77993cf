"""What a turn's tokens must be like, and who says at each place which may come."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

import msgspec


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A `grammar` that the generated tokens follow from where it `begins`: with the first of them, behind the end of
    the reasoning (until then the turn can neither end nor call), or where a call block is opened, if one ever is.

    The last `spent` tokens of the prompt were generated under it before.
    """

    grammar: str
    begins: Literal["now", "answer", "call"] = "now"
    spent: int = 0


class Allowed(msgspec.Struct, frozen=True):
    """Which tokens may come at some places in a row: bits of ceil(vocabulary / 32) little-endian words of 32, token 0
    in the lowest bit of the first; None where any may. `fault` says why the grammar cannot be followed any further
    behind the last of these places: a turn that comes to it then has to end."""

    rows: tuple[bytes | None, ...]
    fault: str | None = None


class Mask(Protocol):
    """What may come next in one turn."""

    def ask(self, ids: Sequence[int], drafts: Sequence[int]) -> "Future[Allowed]":
        """After `ids` more tokens were taken for good: what may come behind 0, 1, … of `drafts`. Only what was allowed
        can be taken; there are no rows behind a draft that may not come. The answer before must have been awaited."""


OpenMask = Callable[[Constraint], Mask]
"""Makes the mask of a turn, before its first token; takes no time."""

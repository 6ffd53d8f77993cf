"""A turn's mask as the engine uses it: asked beside the pass over the rows, applied to their logits."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from dsuf.reference.arithmetic import F32
from dsuf.types import Allowed, Mask


class Masking:
    """The mask of one turn; `taken` are tokens that it follows from the beginning."""

    def __init__(self, mask: Mask, taken: Sequence[int] = ()) -> None:
        self._mask = mask
        self._taken = list(taken)
        self._asked: Future[Allowed] | None = None
        self._fault: tuple[int, str | None] = 0, None

    def take(self, ids: Sequence[int]) -> None:
        """The turn has got `ids`."""
        self._taken += ids

    def ask(self, drafts: Sequence[int] = ()) -> None:
        """Begin to find out what may come behind 0, 1, … of `drafts`."""
        taken, self._taken = self._taken, []
        self._asked = self._mask.ask(taken, drafts)

    def apply(self, logits: F32) -> None:
        """Take from `logits` [drafts + 1, vocabulary], in place, what may not come. Waits for the answer."""
        if self._asked is None:
            raise RuntimeError("a mask is applied before it was asked")
        allowed = self._asked.result()
        self._fault = len(allowed.rows) - 1, allowed.fault
        for row, bits in zip(logits, allowed.rows, strict=False):  # behind a draft that may not come there are none
            if bits is not None:
                row[np.unpackbits(np.frombuffer(bits, np.uint8), count=len(row), bitorder="little") == 0] = -np.inf

    def find_fault(self, given: int) -> str | None:
        """Why the turn had to end, if it did, behind `given` of the drafts that were last asked about."""
        place, fault = self._fault
        return fault if given == place else None

"""Two ways for bytes, of which the better one may not lead anywhere."""

from collections.abc import Sequence

from dsuf.errors import PeerError
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.transport.mover import Mover
from dsuf.observe.log import log_event

MOST_GIVEN_UP = 3
"""So many first reads may be given up before they count as failed: who waits may have left for reasons of its own."""


class FallbackMover:
    """Implements `Mover`: reads by `first`, but by `second` from the moment that `first` has failed before it ever
    worked. Two nodes may both have a device, and no network between them. What has worked once is not given up."""

    def __init__(self, first: Mover, second: Mover) -> None:
        self._first, self._second = first, second
        self._works = False
        self._given_up = 0

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        """As `Mover.read`, one way or the other."""
        if self._given_up < MOST_GIVEN_UP:
            try:
                await self._first.read(offer, pieces, into)
                self._works, self._given_up = True, 0
                return
            except PeerError as error:
                if self._works:
                    raise
                self._given_up = MOST_GIVEN_UP
                log_event("caches of a peer travel over tcp", level="warning", reason=str(error))
            except BaseException:
                self._given_up += not self._works
                raise
        await self._second.read(offer, pieces, into)

    def close(self) -> None:
        """Read nothing any more, either way."""
        self._first.close()
        self._second.close()

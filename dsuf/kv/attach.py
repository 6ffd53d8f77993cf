"""Where the beginning of a prompt comes from: pure functions of lengths and places."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from dsuf.types import CacheLayout, Extent

Source = Literal["device", "host", "peer"]


class Place(msgspec.Struct, frozen=True):
    """A whole page that a prompt shares, by its digest, and the nearest place of its rows."""

    key: bytes
    source: Source


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The position at which a turn begins to compute, and those before it by their source, which add up to it."""

    start: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    peer_tokens: int = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn takes over: rows of `length` positions, of which it computes those from `start` on again.

    `point` is the number of the commit point whose state it has, None without one. `extents` cover the whole prompt.
    """

    length: int
    start: int
    point: int | None
    extents: tuple[Extent, ...]

    def restored(self) -> Restored:
        """What comes of it."""
        tokens = dict.fromkeys(("device", "host", "peer", "none"), 0)
        for extent in self.extents:
            tokens[extent.source] += max(0, min(extent.stop, self.start) - extent.start)
        return Restored(
            start=self.start, device_tokens=tokens["device"], host_tokens=tokens["host"], peer_tokens=tokens["peer"]
        )


NOTHING = Choice(length=0, start=0, point=None, extents=())


def usable_tokens(
    length: int, spare: int, repeats: bool, *, common: int, prompt: int, limit: int | None = None
) -> int:  # fmt: skip
    """Positions of a state of `length` from which a prompt of `prompt` tokens can go on that shares `common` tokens; it
    wants no more than `limit`.

    At least one token of the prompt is left to compute, since its logits choose the next one. 0 means no use.
    """
    wanted = min(common, prompt - 1 if limit is None else min(limit, prompt - 1))
    if wanted >= length:
        return length
    again = repeats and common == prompt == length == wanted + 1
    return wanted if again or length - wanted <= spare else 0


def choose(
    places: Sequence[Place], points: Sequence[int], *, prompt: int, layout: CacheLayout, begun: Source = "host"
) -> Choice:
    """The sources that leave the least of a prompt of `prompt` tokens to compute.

    `places` are the whole pages that it shares, from position 0 on and without a gap; `points` the positions that it
    can use of each commit point it shares, all of whose pages are in `places`. Of equal points the first counts, and a
    commit point before a replay, which is less exact. The begun page of a commit point comes from `begun`. A page in
    which the prompt ends counts for nothing, as the turn writes it itself.
    """
    best = max(range(len(points)), key=lambda i: points[i], default=None)
    if best is not None and not points[best]:
        best = None
    length = start = 0 if best is None else points[best]
    whole = min(len(places), (prompt - 1) // layout.page_tokens) * layout.page_tokens
    if layout.replay_tokens and whole - layout.replay_tokens > start:
        length, start, best = whole, whole - layout.replay_tokens, None
    extents = tuple(_extents(places, length, prompt, layout.page_tokens, begun))
    return Choice(length=length, start=start, point=best, extents=extents)


def _extents(places: Sequence[Place], length: int, prompt: int, page_tokens: int, begun: Source) -> Iterator[Extent]:
    """Neighbouring pages of one source together, the begun page, which a commit point has, and what is left."""
    whole = length // page_tokens
    first = 0
    for page in range(1, whole + 1):
        if page == whole or places[page].source != places[first].source:
            key, source = places[page - 1].key, places[first].source
            yield Extent(key=key, start=first * page_tokens, stop=page * page_tokens, source=source)
            first = page
    key = places[whole - 1].key if whole else b""
    if length > whole * page_tokens:
        yield Extent(key=key, start=whole * page_tokens, stop=length, source=begun)
    yield Extent(key=key, start=length, stop=prompt, source="none")

"""All that the directory knows of other members' prefixes, to look a prompt up in.

Holders are small numbers, and equal sets of them are one object: with millions of entries what counts is the memory
that an entry takes.
"""

from collections.abc import Iterable

import msgspec

from dsuf.kv.attach import usable_tokens
from dsuf.kv.directory.entry import PointEntry, digest_rest, read_point, split_points
from dsuf.kv.trace import Trace

Holders = tuple[int, ...]
Rests = tuple[tuple[int, int], ...]
"""How many states have a rest of so many tokens: (tokens, states)."""


class Found(msgspec.Struct):
    """What one holder keeps of a prompt: a state that it can use at `length` (0: none), its first `pages` pages; and
    whether more may be `coming`, since a turn is there that the prompt goes on from."""

    length: int = 0
    pages: int = 0
    coming: bool = False


class Book:
    """Entries and who holds them."""

    def __init__(self) -> None:
        self._held: dict[int, set[bytes]] = {}
        self._holders: dict[bytes, Holders] = {}
        self._points: dict[bytes, bytes] = {}  # by the digest of what a prompt must share: entries, end to end
        self._rests: dict[bytes, Rests] = {}  # by anchor
        self._sets: dict[Holders, Holders] = {}
        self._single: dict[int, Rests] = {}

    @property
    def entries(self) -> int:
        """Entries of all holders."""
        return sum(map(len, self._held.values()))

    def held(self, holder: int) -> set[bytes]:
        """The entries of `holder`; not to be changed."""
        return self._held.get(holder, set())

    def add(self, holder: int, entries: Iterable[bytes]) -> None:
        """`holder` keeps `entries`, some of which may be known."""
        held = self._held.setdefault(holder, set())
        for entry in entries:
            if entry in held:
                continue
            held.add(entry)
            if entry not in self._holders and (point := read_point(entry)) is not None:
                self._add_point(point, entry)
            self._holders[entry] = self._share((*self._holders.get(entry, ()), holder))

    def remove(self, holder: int, entries: Iterable[bytes]) -> None:
        """`holder` does not keep `entries` any more, some of which may be unknown."""
        held = self._held.get(holder, set())
        for entry in entries:
            if entry not in held:
                continue
            held.discard(entry)
            holders = tuple(other for other in self._holders[entry] if other != holder)
            if holders:
                self._holders[entry] = self._share(holders)
                continue
            del self._holders[entry]
            if (point := read_point(entry)) is not None:
                self._remove_point(point, entry)

    def drop(self, holder: int) -> None:
        """`holder` keeps nothing."""
        self.remove(holder, list(self.held(holder)))
        self._held.pop(holder, None)

    def find(self, trace: Trace) -> dict[int, Found]:
        """By holder, what it keeps of use to a prompt with `trace`. At least one token is left to compute."""
        found: dict[int, Found] = {}
        most_pages = (trace.length - 1) // trace.page_tokens
        chain, page_holders, rests = trace.chain, self._holders, self._rests
        # A million tokens are 8,000 pages, on the event loop: nearly all of them are nowhere.
        for pages in range(len(chain) - 1, -1, -1):
            key = chain[pages]
            if key in page_holders:
                for holder in page_holders[key]:
                    seen = found.setdefault(holder, Found())
                    seen.pages = seen.pages or min(pages, most_pages)
            if key in rests:
                for rest_tokens, _ in rests[key]:
                    self._find_points(trace, pages, rest_tokens, found)
        return {holder: seen for holder, seen in found.items() if seen.length or seen.pages or seen.coming}

    def _find_points(self, trace: Trace, pages: int, rest_tokens: int, found: dict[int, Found]) -> None:
        """Add those that share the first `pages` pages of `trace` and the next `rest_tokens` tokens."""
        entries = self._points.get(digest_rest(trace, pages, rest_tokens), b"")
        for entry in split_points(entries):
            point = read_point(entry)
            assert point is not None
            shared = pages * trace.page_tokens
            whole = digest_rest(trace, pages, point.length - shared) == point.whole
            common = point.length if whole else shared + rest_tokens
            length = usable_tokens(point.length, point.spare, point.repeats, common=common, prompt=trace.length)
            for holder in self._holders[entry]:
                seen = found.setdefault(holder, Found())
                seen.coming = seen.coming or (point.coming and length > 0)
                seen.length = max(seen.length, 0 if point.coming else length)

    def _add_point(self, point: PointEntry, entry: bytes) -> None:
        self._points[point.rest] = self._points.get(point.rest, b"") + entry
        self._count_rest(point, 1)

    def _remove_point(self, point: PointEntry, entry: bytes) -> None:
        left = b"".join(other for other in split_points(self._points[point.rest]) if other != entry)
        if left:
            self._points[point.rest] = left
        else:
            del self._points[point.rest]
        self._count_rest(point, -1)

    def _count_rest(self, point: PointEntry, change: int) -> None:
        """One state more or less on its anchor has a rest of so many tokens."""
        counts = dict(self._rests.get(point.anchor, ()))
        counts[point.rest_tokens] = counts.get(point.rest_tokens, 0) + change
        rests = tuple((tokens, states) for tokens, states in counts.items() if states)
        if rests == ((point.rest_tokens, 1),):  # nearly all anchors have one state
            rests = self._single.setdefault(point.rest_tokens, rests)
        if rests:
            self._rests[point.anchor] = rests
        else:
            del self._rests[point.anchor]

    def _share(self, holders: Holders) -> Holders:
        """The one object for `holders`. There are few: sets of members that keep the same."""
        return self._sets.setdefault(holders, holders)

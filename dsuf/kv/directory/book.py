"""All that the directory knows of other members' prefixes, to look a prompt up in.

Holders are small numbers, and equal sets of them are one object: with millions of entries what counts is the memory
that an entry takes.
"""

from collections.abc import Iterable

import msgspec

from dsuf.kv.attach import usable_tokens
from dsuf.kv.directory.entry import PointEntry, digest_rest, read_point
from dsuf.kv.trace import Trace

Holders = tuple[int, ...]


class Found(msgspec.Struct):
    """What one holder keeps of a prompt: a state that it can use at `length` (0: none), its first `pages` pages."""

    length: int = 0
    pages: int = 0


class Book:
    """Entries and who holds them."""

    def __init__(self) -> None:
        self._held: dict[int, set[bytes]] = {}
        self._pages: dict[bytes, Holders] = {}
        self._points: dict[bytes, dict[bytes, Holders]] = {}  # by the digest of what a prompt must share at least
        self._rests: dict[bytes, dict[int, int]] = {}  # by anchor: how many entries have a rest of so many tokens
        self._sets: dict[Holders, Holders] = {}

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
            point = read_point(entry)
            if point is None:
                self._pages[entry] = self._with(self._pages.get(entry, ()), holder)
            else:
                self._add_point(point, entry, holder)

    def remove(self, holder: int, entries: Iterable[bytes]) -> None:
        """`holder` does not keep `entries` any more, some of which may be unknown."""
        held = self._held.get(holder, set())
        for entry in entries:
            if entry not in held:
                continue
            held.discard(entry)
            point = read_point(entry)
            if point is not None:
                self._remove_point(point, entry, holder)
            elif holders := self._without(self._pages[entry], holder):
                self._pages[entry] = holders
            else:
                del self._pages[entry]

    def drop(self, holder: int) -> None:
        """`holder` keeps nothing."""
        self.remove(holder, list(self.held(holder)))
        self._held.pop(holder, None)

    def find(self, trace: Trace) -> dict[int, Found]:
        """By holder, what it keeps of use to a prompt with `trace`. At least one token is left to compute."""
        found: dict[int, Found] = {}
        most_pages = (trace.length - 1) // trace.page_tokens
        for pages in reversed(range(len(trace.chain))):
            for holder in self._pages.get(trace.chain[pages], ()):
                seen = found.setdefault(holder, Found())
                seen.pages = seen.pages or min(pages, most_pages)
            for rest_tokens in self._rests.get(trace.chain[pages], ()):
                self._find_points(trace, pages, rest_tokens, found)
        return {holder: seen for holder, seen in found.items() if seen.length or seen.pages}

    def _find_points(self, trace: Trace, pages: int, rest_tokens: int, found: dict[int, Found]) -> None:
        """Add those that share the first `pages` pages of `trace` and the next `rest_tokens` tokens."""
        for entry, holders in self._points.get(digest_rest(trace, pages, rest_tokens), {}).items():
            point = read_point(entry)
            assert point is not None
            shared = pages * trace.page_tokens
            whole = digest_rest(trace, pages, point.length - shared) == point.whole
            common = point.length if whole else shared + rest_tokens
            length = usable_tokens(point.length, point.spare, point.repeats, common=common, prompt=trace.length)
            for holder in holders:
                seen = found.setdefault(holder, Found())
                seen.length = max(seen.length, length)

    def _add_point(self, point: PointEntry, entry: bytes, holder: int) -> None:
        entries = self._points.setdefault(point.rest, {})
        if entry not in entries:
            rests = self._rests.setdefault(point.anchor, {})
            rests[point.rest_tokens] = rests.get(point.rest_tokens, 0) + 1
        entries[entry] = self._with(entries.get(entry, ()), holder)

    def _remove_point(self, point: PointEntry, entry: bytes, holder: int) -> None:
        entries = self._points[point.rest]
        if holders := self._without(entries[entry], holder):
            entries[entry] = holders
            return
        del entries[entry]
        if not entries:
            del self._points[point.rest]
        rests = self._rests[point.anchor]
        rests[point.rest_tokens] -= 1
        if not rests[point.rest_tokens]:
            del rests[point.rest_tokens]
        if not rests:
            del self._rests[point.anchor]

    def _with(self, holders: Holders, holder: int) -> Holders:
        return self._share((*holders, holder))

    def _without(self, holders: Holders, holder: int) -> Holders:
        return self._share(tuple(other for other in holders if other != holder))

    def _share(self, holders: Holders) -> Holders:
        """The one object for `holders`. There are few: sets of members that keep the same."""
        return self._sets.setdefault(holders, holders)

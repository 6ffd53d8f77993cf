"""What this node has to tell: the entries of its own arena, and those of them that changed since they were told."""

import asyncio
from itertools import islice
from typing import NamedTuple

from dsuf.kv.arena import Arena
from dsuf.kv.directory.entry import STRIDE_PAGES, describe_coming, describe_page, describe_point
from dsuf.kv.point import CommitPoint, HostPage
from dsuf.kv.trace import Trace


class Changes(NamedTuple):
    """Entries that came and entries that went."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Shelf:
    """Implements `Listener` over `arena`. `changed` is set while there is something to tell.

    No more than `limit` changes wait; with more, `overflowed` is true and all has to be told anew. Pages without a
    state are told where the arena's engine replays: elsewhere nobody can use them.
    """

    def __init__(self, arena: Arena, limit: int) -> None:
        self.changed = asyncio.Event()
        self.overflowed = False
        self._arena, self._limit = arena, limit
        self._held: dict[bytes, int] = {}
        self._unsent: dict[bytes, bool] = {}
        for node in arena.tree.nodes():
            if node.host is not None and _is_told(node.host):
                self._tell(node.host)
            for point in node.points:
                self.keep_point(point)
        arena.listeners.append(self)

    def __len__(self) -> int:
        """Entries of what is kept now."""
        return len(self._held)

    @property
    def unsent(self) -> int:
        """Changes that wait."""
        return len(self._unsent)

    def keep_page(self, page: HostPage) -> None:
        """A page came; the one before it is no longer the last of its branch."""
        before = page.parent
        if before is not None and not _is_told(before) and not _follow(before, page):
            self._withdraw(before)
        self._tell(page)

    def drop_page(self, page: HostPage) -> None:
        """A page went; the one before it may be the last of its branch now."""
        if _is_stride(page) or not _follow(page):
            self._withdraw(page)
        before = page.parent
        if before is not None and before.node.host is before and not _is_stride(before) and not _follow(before):
            self._tell(before)

    def keep_point(self, point: CommitPoint) -> None:
        """A state came."""
        self._add(describe_point(point))

    def drop_point(self, point: CommitPoint) -> None:
        """A state went."""
        self._remove(describe_point(point))

    def expect(self, prompt: Trace) -> None:
        """A turn with this prompt came."""
        if entry := describe_coming(prompt):
            self._add(entry)

    def expect_no_more(self, prompt: Trace) -> None:
        """A turn with this prompt left, and what it leaves behind is kept."""
        if (entry := describe_coming(prompt)) in self._held:  # it may have come before anybody listened
            self._remove(entry)

    def take(self, limit: int) -> Changes:
        """The first `limit` changes, which wait no longer."""
        taken = [(entry, self._unsent.pop(entry)) for entry in list(islice(self._unsent, limit))]
        if not self._unsent:
            self.changed.clear()
        added = tuple(entry for entry, kept in taken if kept)
        return Changes(added, tuple(entry for entry, kept in taken if not kept))

    def take_all(self) -> list[bytes]:
        """All that is kept now; no change waits any more."""
        self._unsent.clear()
        self.changed.clear()
        self.overflowed = False
        return list(self._held)

    def close(self) -> None:
        """Hear of nothing any more."""
        if self in self._arena.listeners:
            self._arena.listeners.remove(self)

    def _tell(self, page: HostPage) -> None:
        if self._arena.replay_tokens:
            self._add(describe_page(page))

    def _withdraw(self, page: HostPage) -> None:
        if describe_page(page) in self._held:
            self._remove(describe_page(page))

    def _add(self, entry: bytes) -> None:
        """One thing more has this entry."""
        self._held[entry] = self._held.get(entry, 0) + 1
        if self._held[entry] == 1:
            self._change(entry, True)

    def _remove(self, entry: bytes) -> None:
        """One thing less has this entry."""
        self._held[entry] -= 1
        if not self._held[entry]:
            del self._held[entry]
            self._change(entry, False)

    def _change(self, entry: bytes, kept: bool) -> None:
        """Let a change wait; with the opposite one that waits already it comes to nothing."""
        if self._unsent.pop(entry, kept) == kept:
            self._unsent[entry] = kept
        if len(self._unsent) > self._limit:
            self._unsent.clear()
            self.overflowed = True
        if self._unsent or self.overflowed:
            self.changed.set()
        else:
            self.changed.clear()


def _is_stride(page: HostPage) -> bool:
    return page.node.pages % STRIDE_PAGES == 0


def _follow(page: HostPage, but: HostPage | None = None) -> bool:
    """Whether a page that is found follows `page`, other than `but`."""
    return any(follower.node.host is follower and follower is not but for follower in page.followers)


def _is_told(page: HostPage) -> bool:
    """Whether the pages up to `page` have an entry."""
    return _is_stride(page) or not _follow(page)

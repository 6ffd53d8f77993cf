"""The host store: whole pages, each kept once, and commit points on them, within one buffer.

absent -> filling (`reserve`) -> ready (`publish`) <-> leased (`lease`, `release`); `withdraw` makes what is leased
dying until its last lease is returned, and everything else absent. All methods run on the event loop.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dsuf.kv.attach import usable_tokens
from dsuf.kv.blocks import Blocks
from dsuf.kv.calls import when_ended
from dsuf.kv.claims import Filling, Lease
from dsuf.kv.point import CommitPoint, HostPage, PointHead
from dsuf.kv.prefix import Node, PrefixTree
from dsuf.kv.trace import Trace
from dsuf.kv.worth import Ranking


class Match(NamedTuple):
    """A commit point and the positions of it that a prompt can use."""

    point: CommitPoint
    length: int


class Listener(Protocol):
    """Somebody who is told, at once and on the event loop, what can be found from now on and what cannot any more."""

    def keep_page(self, page: HostPage) -> None:
        """`page` was published; those before it are told first."""

    def drop_page(self, page: HostPage) -> None:
        """`page` is found no more; those that follow it went first."""

    def keep_point(self, point: CommitPoint) -> None:
        """`point` was published; it has a state."""

    def drop_point(self, point: CommitPoint) -> None:
        """`point` is found no more; it has a state."""

    def expect(self, prompt: Trace) -> None:
        """A turn is here whose cache will be kept, or is about to be: `prompt` and what it says. It can be expected
        several times."""

    def expect_no_more(self, prompt: Trace) -> None:
        """Once less."""


class Arena:
    """Pages and commit points in `blocks`, whose size is that of a page, indexed in `tree`.

    `evicted` counts the commit points that had to go. `listeners` are told what comes and goes.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.tree = PrefixTree()
        self.evicted = 0
        self.listeners: list[Listener] = []
        self._most_off = 0
        self._points: dict[CommitPoint, None] = {}
        self._fillings: set[Filling] = set()
        self._leases: set[Lease] = set()
        self._ranking = Ranking()

    @property
    def replay_tokens(self) -> int:
        """That of the engine's layout: it decides what a commit point saves. 0 until it is set."""
        return self._ranking.replay_tokens

    @replay_tokens.setter
    def replay_tokens(self, tokens: int) -> None:
        """What is kept already keeps its worth until it is looked at again."""
        self._ranking.replay_tokens = tokens

    def find(self, path: Sequence[Node], prompt: Trace, limit: int | None = None) -> Match | None:
        """The commit point of which `prompt`, which walks `path`, can use the most positions, but not more than
        `limit`; the shortest of several; None if there is none."""
        best: Match | None = None
        for node in reversed(path):
            for point in node.points:
                head = point.head
                length = usable_tokens(
                    head.length, head.off_tokens, head.repeats, common=head.common(prompt),
                    prompt=prompt.length, limit=limit,
                )  # fmt: skip
                if best is None or (length, -head.length) > (best.length, -best.point.head.length):
                    best = Match(point, length)
            # Points further up need fewer pages to be of use, so they are no longer than this.
            if best is not None and best.length >= node.pages * prompt.page_tokens + self._most_off:
                break
        return best if best is not None and best.length > 0 else None

    def find_exact(self, trace: Trace, length: int) -> CommitPoint | None:
        """The commit point with a state that holds the first `length` positions of `trace` and no more."""
        path = self.tree.walk(trace)[: length // trace.page_tokens + 1]
        lowest = max(0, length - self._most_off) // trace.page_tokens
        points = (point for node in path[lowest:] for point in node.points)
        return next((p for p in points if p.head.length == length and p.head.common(trace) >= length), None)

    def reserve(
        self, trace: Trace, length: int, payload_bytes: int, after: Filling | None = None
    ) -> Filling | None:  # fmt: skip
        """Blocks for a commit point of the first `length` positions of `trace`, or None where there is no room: what is
        leased, filling or dying stays. With `after` for what follows that, which has to be published first.

        Commit points of the least worth make room, but none goes if it would not be enough.
        """
        base, pages, wanted = self._count(trace, length, payload_bytes, after)
        if base is not None:
            base.uses += 1
        if not self._make_room(wanted, base):
            self._unuse(base)
            return None
        filling = Filling(trace, base, self.blocks.take(wanted), pages, length % trace.page_tokens > 0, after)
        self._fillings.add(filling)
        return filling

    def has_room(self, trace: Trace, length: int, payload_bytes: int) -> bool:
        """Whether `reserve` would find room, whatever has to go for it."""
        base, _, wanted = self._count(trace, length, payload_bytes)
        return wanted <= self.blocks.free or wanted <= self.blocks.count - self._pinned(base)

    def points(self) -> list[CommitPoint]:
        """All commit points that can be found."""
        return [point for point in self._points if point.state == "ready"]

    def kept_pages(self, trace: Trace) -> int:
        """How many of the first whole pages of `trace` are kept."""
        return next((node.pages for node in reversed(self.tree.walk(trace)) if node.host is not None), 0)

    def publish(
        self, filling: Filling, head: PointHead, checksums: Sequence[bytes], checksum: bytes
    ) -> CommitPoint | None:
        """Let what was written be found: pages with their `checksums`, and the point that they end in, with its own.

        None where it was dropped meanwhile, or what it stands on.
        """
        if not self._stands(filling):
            self.abandon(filling)
            return None
        self._fillings.discard(filling)
        last = filling.last = self._add_pages(filling, checksums)
        anchor = self.tree.root(filling.trace) if last is None else last.node
        while anchor.pages * filling.trace.page_tokens > head.anchor_tokens and anchor.parent is not None:
            anchor = anchor.parent
        size = filling.trace.page_tokens
        point = CommitPoint(head, anchor, last, filling.tail, filling.payload, checksum, size)
        self._points[point] = None
        if last is not None:
            last.points.append(point)
        if head.stateful:
            anchor.points.append(point)
            for listener in self.listeners:
                listener.keep_point(point)
        self._most_off = max(self._most_off, head.most_off)
        self._ranking.value(point)
        self._unuse(filling.base)
        return point

    def abandon(self, filling: Filling) -> None:
        """Give up what was not published; its blocks come back when nobody writes them any more. Idempotent."""
        when_ended(filling.writing, lambda: self._abandon(filling))

    def lease(self, page: HostPage | None, point: CommitPoint | None = None, *, firm: bool = False) -> Lease:
        """Keep the pages up to `page`, and a ready `point`, until `release`; `clear` spares what is leased `firm`ly."""
        lease = Lease(page, point, firm)
        if page is not None:
            page.uses += 1
        if point is not None:
            assert point.state == "ready", point.state
            point.leases += 1
        self._leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Return a lease; idempotent."""
        if not lease.live:
            return
        lease.live = False
        self._leases.discard(lease)
        if lease.point is not None:
            lease.point.leases -= 1
            if lease.point.state == "dying" and not lease.point.leases:
                self._drop(lease.point)
        self._unuse(lease.page)

    def credit(self, point: CommitPoint) -> None:
        """`point` was of use, or would have been made again."""
        point.uses += 1
        self._ranking.value(point)

    def expect(self, prompt: Trace) -> None:
        """The cache of a turn with this prompt will be kept here; until `expect_no_more`, once for each time."""
        for listener in self.listeners:
            listener.expect(prompt)

    def expect_no_more(self, prompt: Trace) -> None:
        """It can be found, or will not be."""
        for listener in self.listeners:
            listener.expect_no_more(prompt)

    def withdraw(self, point: CommitPoint) -> None:
        """Let `point` be found no more, and drop it as soon as nobody uses it; idempotent."""
        if point.state != "ready":
            return
        point.state = "dying"
        if point.head.stateful:
            point.anchor.points.remove(point)
            for listener in self.listeners:
                listener.drop_point(point)
        if not point.leases:
            self._drop(point)
        self.tree.prune(point.anchor)

    def withdraw_page(self, page: HostPage) -> None:
        """Let `page`, and all that stands on it, be found no more; leases keep the rows."""
        pages = list(page.tree())
        for point in [point for page in pages for point in page.points]:
            self.withdraw(point)
        for page in reversed(pages):
            self._hide(page)

    def clear(self) -> int:
        """Withdraw everything but what is leased firmly, also what is being written; how many commit points that
        were."""
        firm = [lease for lease in self._leases if lease.firm]
        spared = {page for lease in firm if lease.page is not None for page in lease.page.chain()}
        points = [point for point in self.points() if all(point is not lease.point for lease in firm)]
        for point in points:
            self.withdraw(point)
        for filling in self._fillings:
            filling.valid = False
        for node in list(self.tree.nodes()):
            if node.host is not None and node.host not in spared:
                self.withdraw_page(node.host)
        return len(points)

    def counters(self) -> Mapping[str, int]:
        """What is kept now, and what is in use: leases and what is being filled or dies are zero when idle."""
        return {
            "entries": len(self._points),
            "bytes": (self.blocks.count - self.blocks.free) * self.blocks.block_bytes,
            "leases": len(self._leases),
            "filling": len(self._fillings),
            "dying": len({lease.point for lease in self._leases if lease.point and lease.point.state == "dying"}),
        }

    def _abandon(self, filling: Filling) -> None:
        """Take back the blocks of `filling`."""
        if filling in self._fillings:
            self._fillings.discard(filling)
            self.blocks.give(filling.blocks)
            self._unuse(filling.base)

    def _stands(self, filling: Filling) -> bool:
        """Whether what is under `filling` can be found, so that it can be too."""
        after, filling.after = filling.after, None
        if after is not None and after.last is not None and after.last.node.host is after.last:  # else it is gone
            filling.base = after.last
            filling.base.uses += 1
        base = filling.base
        return filling.valid and (not filling.first_page if base is None else base.node.host is base)

    def _count(
        self, trace: Trace, length: int, payload_bytes: int, after: Filling | None = None
    ) -> tuple[HostPage | None, int, int]:  # fmt: skip
        """What is kept of the whole pages, how many are not, and the blocks that a commit point needs beside."""
        whole, begun = divmod(length, trace.page_tokens)
        base = None
        if after is None:
            base = next((n.host for n in reversed(self.tree.walk(trace)[: whole + 1]) if n.host is not None), None)
        pages = whole - (after.stop_page if after is not None else 0 if base is None else base.node.pages)
        return base, pages, pages + (begun > 0) + self.blocks.blocks_for(payload_bytes)

    def _make_room(self, wanted: int, base: HostPage | None) -> bool:
        """Whether `wanted` blocks are free, after evicting what is worth the least."""
        if wanted > self.blocks.free and wanted > self.blocks.count - self._pinned(base):
            return False
        while self.blocks.free < wanted and (point := self._ranking.pop()) is not None:
            self.evicted += 1
            self.withdraw(point)
        return self.blocks.free >= wanted

    def _pinned(self, base: HostPage | None) -> int:
        """Blocks that no eviction frees."""
        pinned = sum(len(filling.blocks) for filling in self._fillings)
        tops = [base, *(filling.base for filling in self._fillings), *(lease.page for lease in self._leases)]
        for point in {lease.point for lease in self._leases if lease.point is not None}:
            pinned += len(point.blocks) + (point.tail is not None)
            tops.append(point.page)
        seen: set[HostPage] = set()
        for top in tops:
            for page in top.chain() if top is not None else ():
                if page in seen:
                    break
                seen.add(page)
        return pinned + len(seen)

    def _add_pages(self, filling: Filling, checksums: Sequence[bytes]) -> HostPage | None:
        """Put the pages of `filling` into the tree; the last one. One that came there meanwhile is as good."""
        last = filling.base
        node = self.tree.root(filling.trace) if last is None else last.node
        nodes = self.tree.follow(node, filling.trace, filling.stop_page)
        for node, block, checksum in zip(nodes, filling.pages, checksums, strict=True):
            if node.host is None:
                node.host = HostPage(node, last, block, checksum)
                if last is not None:
                    last.followers.append(node.host)
                for listener in self.listeners:
                    listener.keep_page(node.host)
            else:
                self.blocks.give([block])
            last = node.host
        return last

    def _drop(self, point: CommitPoint) -> None:
        """Nothing is left of `point`."""
        point.state = "absent"
        del self._points[point]
        self.blocks.give([*point.blocks, *([] if point.tail is None else [point.tail])])
        if point.page is not None:
            point.page.points.remove(point)
            self._let_go(point.page)

    def _hide(self, page: HostPage) -> None:
        """Let `page` be found no more, if it still is."""
        if page.node.host is page:
            page.node.host = None
            self.tree.prune(page.node)
            for listener in self.listeners:
                listener.drop_page(page)

    def _unuse(self, page: HostPage | None) -> None:
        """One use less of `page`."""
        if page is not None:
            page.uses -= 1
            self._let_go(page)

    def _let_go(self, page: HostPage) -> None:
        """Something that stood on `page` is gone; what nothing stands on goes too."""
        while not page.holds:
            self.blocks.give([page.block])
            self._hide(page)
            if page.parent is None:
                return
            page.parent.followers.remove(page)
            page = page.parent
        self._ranking.widow(page)

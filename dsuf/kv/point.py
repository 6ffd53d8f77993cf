"""What the arena keeps: copies of whole pages, and commit points that stand on them. Only the arena changes them."""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import xxhash

from dsuf.errors import CheckpointError
from dsuf.kv.prefix import Node
from dsuf.kv.trace import ID_BYTES, Trace, common_after
from dsuf.types import SessionState, Span

State = Literal["absent", "filling", "ready", "dying"]
"""Not (or no longer) kept, written but not found, found, and not found but still in use. Leases count the uses."""


class DamagedCache(CheckpointError):
    """A kept cache is not what was written; `page` is the damaged page, None where it is a commit point's own part."""

    def __init__(self, text: str, page: "HostPage | None" = None) -> None:
        super().__init__(text)
        self.page = page


class HostPage:
    """A whole page in `block`, kept once however many stand on it: pages that follow, commit points that end here, and
    `uses` by leases and by what is being written after it."""

    __slots__ = ("block", "checksum", "followers", "node", "parent", "points", "uses")

    def __init__(self, node: Node, parent: "HostPage | None", block: int, checksum: bytes) -> None:
        self.node, self.parent, self.block, self.checksum = node, parent, block, checksum
        self.followers: list[HostPage] = []
        self.points: list[CommitPoint] = []
        self.uses = 0

    @property
    def holds(self) -> int:
        """How many stand on it."""
        return len(self.followers) + len(self.points) + self.uses

    def chain(self) -> Iterator["HostPage"]:
        """This page and those before it, the first one last."""
        page: HostPage | None = self
        while page is not None:
            yield page
            page = page.parent

    def tree(self) -> Iterator["HostPage"]:
        """This page and all that follow it."""
        left = [self]
        while left:
            page = left.pop()
            left += page.followers
            yield page


class PointHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit point is: a state of `payload_bytes` at `length`, or no state but whole pages alone.

    A prompt must share `anchor_tokens`, whole pages, to have any use of it; `ids` are the tokens after those, and
    `spans` all pictures.
    """

    length: int
    anchor_tokens: int = 0
    ids: bytes = b""
    spans: tuple[Span, ...] = ()
    payload_bytes: int = 0
    stateful: bool = False
    spare: int = 0
    near: int = 0
    repeats: bool = False

    @property
    def off_tokens(self) -> int:
        """How many of its last positions any prompt can do without."""
        return max(self.spare, self.near)

    @property
    def most_off(self) -> int:
        """How many of its last positions some prompt can do without."""
        return max(self.off_tokens, self.repeats)

    def common(self, trace: Trace) -> int:
        """How many first positions `trace` shares, which has the first `anchor_tokens` in common; or just those where
        what it shares is too little to be of use."""
        needed = self.length - self.most_off - self.anchor_tokens
        # Thousands of commit points may hang on a common beginning, and nearly all of them end here.
        if needed > 0 and not trace.ids.startswith(self.ids[: needed * ID_BYTES], self.anchor_tokens * ID_BYTES):
            return self.anchor_tokens
        return common_after(self.anchor_tokens, self.ids, self.spans, trace)


class CommitPoint:
    """A commit point on the pages up to `page`, found at `anchor`. `tail` has the rows of its last, begun page."""

    __slots__ = (
        "anchor", "blocks", "checksum", "head", "leases", "page", "page_tokens", "since", "state", "tail", "uses",
        "worth",
    )  # fmt: skip

    def __init__(
        self, head: PointHead, anchor: Node, page: HostPage | None, tail: int | None, blocks: list[int],
        checksum: bytes, page_tokens: int,
    ) -> None:  # fmt: skip
        self.head, self.anchor, self.page, self.page_tokens = head, anchor, page, page_tokens
        self.tail, self.blocks, self.checksum = tail, blocks, checksum
        self.state: State = "ready"
        self.leases = 0
        self.uses = 0
        self.since = self.worth = 0.0

    @property
    def rest(self) -> bytes:
        """The token ids of its begun page."""
        return self.head.ids[len(self.head.ids) - self.head.length % self.page_tokens * ID_BYTES :]

    def own(self, replay_tokens: int) -> tuple[int, int]:
        """What would go without it: the tokens that would have to be computed again, and the blocks that would be free.

        The blocks are its own and the last pages as far as nothing else stands on them. The tokens are those after the
        nearest commit point before it, or, with `replay_tokens`, after a window within the pages that others hold.
        """
        length, blocks, alone = self.head.length, len(self.blocks) + (self.tail is not None), True
        page, above = self.page, None
        # Thousands of pages, on the event loop: hence no calls for those on which nothing else ends.
        while page is not None:
            if page.points:
                following = self.rest if above is None else above.node.content
                near = (p for p in page.points if p.head.stateful and p.head.length < length)
                before = [p.head.length for p in near if following.startswith(p.rest)]
                if before:
                    return length - max(before), blocks
            alone = alone and len(page.followers) + len(page.points) + page.uses == 1
            if alone:
                blocks += 1
            elif replay_tokens:
                return length - max(0, page.node.pages * self.page_tokens - replay_tokens), blocks
            page, above = page.parent, page
        return length, blocks


def make_head(trace: Trace, state: SessionState) -> PointHead:
    """The head of a commit point that keeps `state`, whose tokens and pictures are `trace`."""
    needed = max(0, state.length - max(state.spare, state.near, state.repeats))
    anchor_tokens = needed - needed % trace.page_tokens
    return PointHead(
        length=state.length, anchor_tokens=anchor_tokens, ids=state.ids[anchor_tokens * ID_BYTES :], spans=trace.spans,
        payload_bytes=len(state.payload), stateful=True, spare=state.spare, near=state.near, repeats=state.repeats,
    )  # fmt: skip


def seal(*parts: bytes | memoryview) -> bytes:
    """The checksum of a copy: 128 bits against accidents, at the speed of memory. Who may write here is trusted."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def seal_point(head: PointHead, tail: Iterable[memoryview], payload: Iterable[memoryview]) -> bytes:
    """The checksum of a commit point's own parts."""
    return seal(msgspec.msgpack.encode(head), *tail, *payload)

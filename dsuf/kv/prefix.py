"""The index over prefixes: a tree of whole pages, by what they hold under what stands before them.

A digest finds a page among those that follow another; comparing its content, on the way from the root, makes it sure.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dsuf.kv.trace import ID_BYTES, Trace

if TYPE_CHECKING:
    from dsuf.kv.point import CommitPoint, HostPage


class Node:
    """A page of a prefix, wherever its rows are: `device` is its page in the pool, `host` its copy in the arena.

    `pages` counts it and those before it; the root of a tenant stands for none. `points` are the commit points that
    need the pages up to here in common with a prompt, `pins` the turns that are about to add to it.
    """

    __slots__ = ("children", "content", "device", "digest", "host", "pages", "parent", "pins", "points")

    def __init__(self, parent: "Node | None", digest: bytes, content: bytes) -> None:
        self.parent, self.digest, self.content = parent, digest, content
        self.pages: int = -1 if parent is None else parent.pages + 1
        self.children: dict[bytes, list[Node]] = {}
        self.device: int | None = None
        self.host: HostPage | None = None
        self.points: list[CommitPoint] = []
        self.pins = 0

    def below(self) -> Iterator["Node"]:
        """The pages that follow this one."""
        for nodes in self.children.values():
            yield from nodes


class PrefixTree:
    """All nodes that somebody has a use for; `prune` drops the others."""

    def __init__(self) -> None:
        self._top = Node(None, b"", b"")
        self._top.pins = 1

    def walk(self, trace: Trace, begun: Sequence[Node] = ()) -> list[Node]:
        """The root that `trace` belongs to and the nodes of its first pages, as far as they are known; may be empty.
        `begun` is what was found the last time."""
        path = list(begun) if begun and self._is_known(begun[-1]) else self._begin(trace)
        if not path:
            return path
        # A million tokens are 8,000 pages, on the event loop: hence no calls in here.
        ids, shown, size = trace.ids, trace.shown, trace.page_tokens * ID_BYTES
        for page, digest in enumerate(trace.chain[len(path) :], len(path) - 1):
            content = ids[page * size : (page + 1) * size]
            if page in shown:
                content += shown[page]
            for node in path[-1].children.get(digest, ()):
                if node.content == content:
                    path.append(node)
                    break
            else:
                break
        return path

    def root(self, trace: Trace) -> Node:
        """The root that `trace` belongs to, made if need be."""
        return self._enter(self._top, trace.chain[0], trace.head)

    def follow(self, node: Node, trace: Trace, pages: int) -> list[Node]:
        """The nodes of `trace` after `node`, up to its first `pages` pages, made if need be."""
        path = []
        for page in range(node.pages, pages):
            node = self._enter(node, trace.chain[page + 1], trace.content(page))
            path.append(node)
        return path

    def pin(self, node: Node) -> None:
        """Keep `node` until `unpin`."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Return a pin."""
        node.pins -= 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Drop `node`, and what stands before it, as far as they serve nobody."""
        while node.parent is not None and not _serves(node):
            siblings = node.parent.children.get(node.digest, [])
            if node in siblings:  # it may be gone already
                siblings.remove(node)
                if not siblings:
                    del node.parent.children[node.digest]
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included."""
        left = list(self._top.below())
        while left:
            node = left.pop()
            left += node.below()
            yield node

    def _begin(self, trace: Trace) -> list[Node]:
        """The root that `trace` belongs to, if it is known."""
        root = self._find(self._top, trace.chain[0], trace.head)
        return [] if root is None else [root]

    def _is_known(self, node: Node) -> bool:
        """Whether `node` was not dropped; then those before it were not either."""
        return node.parent is not None and node in node.parent.children.get(node.digest, ())

    def _find(self, node: Node, digest: bytes, content: bytes) -> Node | None:
        for child in node.children.get(digest, ()):
            if child.content == content:
                return child
        return None

    def _enter(self, node: Node, digest: bytes, content: bytes) -> Node:
        child = self._find(node, digest, content)
        if child is None:
            child = Node(node, digest, content)
            node.children.setdefault(digest, []).append(child)
        return child


def _serves(node: Node) -> bool:
    """Whether anything hangs on `node`."""
    return bool(node.children or node.points or node.pins or node.host is not None or node.device is not None)

"""The pages of an engine: who holds them, and which of those that nobody holds are still of use.

A page is free; or held, by so many references; or cached: held by nobody, but found by its prefix until its room is
needed. Held pages may be found too, once they are whole.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from dsuf.kv.prefix import Node


class PagePool:
    """Pages 0 to `pages` (exclusive). `forgotten` is told of a node that has no page any more."""

    def __init__(self, pages: int, forgotten: Callable[[Node], None]) -> None:
        self.pages = pages
        self._forgotten = forgotten
        self._free = list(range(pages))[::-1]
        self._references = [0] * pages
        self._named: dict[int, Node] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def room(self) -> int:
        """Pages that `take` could give out."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return self.pages - self.room

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that are found."""
        return len(self._cached)

    def take(self, count: int) -> list[int] | None:
        """`count` pages of one reference each: free ones, then the least recently used cached ones; None: no room."""
        if count > self.room:
            return None
        while len(self._free) < count:
            self.forget(next(iter(self._cached)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def retain(self, pages: Sequence[int]) -> None:
        """One more reference to each of `pages`, which are held or cached."""
        for page in pages:
            assert self._references[page] or page in self._cached, page
            self._cached.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each of `pages`, which stand in their order in a sequence.

        The last ones are the first to go, since those before serve more prompts.
        """
        for page in reversed(pages):
            assert self._references[page] > 0, page
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._named:
                self._cached[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, node: Node) -> None:
        """Let a held `page` be found as the page of `node`, unless another one is, or it has a name."""
        assert self._references[page] > 0, page
        if node.device is None and page not in self._named:
            node.device = page
            self._named[page] = node

    def forget(self, page: int) -> None:
        """Let `page` be found no more; a cached one is free then."""
        node = self._named.pop(page, None)
        if node is None:
            return
        node.device = None
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)
        self._forgotten(node)

    def forget_all(self) -> None:
        """Let nothing be found."""
        for page in list(self._named):
            self.forget(page)

    def is_shared(self, page: int) -> bool:
        """Whether a held `page` has more than one reference."""
        return self._references[page] > 1

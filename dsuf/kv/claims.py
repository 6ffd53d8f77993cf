"""Claims on the arena's blocks: to write them before they are found, and to read them while they are."""

import asyncio
from collections.abc import Sequence
from typing import Any

from dsuf.kv.point import CommitPoint, HostPage
from dsuf.kv.trace import Trace


class Filling:
    """Blocks that are being written for a commit point on `trace`: whole pages after `base`, the begun page, the state.

    Nobody else sees them before they are published. `writing` is the last call that writes them, `valid` becomes false
    when what is kept is cleared. One that follows `after`, which is being written too, gets its `base` from there;
    `last` is the last page of what was published.
    """

    def __init__(
        self, trace: Trace, base: HostPage | None, blocks: Sequence[int], pages: int, tail: bool,
        after: "Filling | None" = None,
    ) -> None:  # fmt: skip
        self.trace, self.base, self.after = trace, base, after
        self.first_page = after.stop_page if after is not None else 0 if base is None else base.node.pages
        self.last: HostPage | None = None
        self.pages = list(blocks[:pages])
        self.tail = blocks[pages] if tail else None
        self.payload = list(blocks[pages + tail :])
        self.writing: asyncio.Future[Any] | None = None
        self.valid = True

    @property
    def stop_page(self) -> int:
        """The page after its last whole one."""
        return self.first_page + len(self.pages)

    @property
    def blocks(self) -> list[int]:
        """All of them."""
        return [*self.pages, *([] if self.tail is None else [self.tail]), *self.payload]


class Lease:
    """The right to read the pages up to `page`, and `point`, until `Arena.release`; where it is `firm` they can also be
    found until then."""

    def __init__(self, page: HostPage | None, point: CommitPoint | None, firm: bool = False) -> None:
        self.page, self.point, self.firm = page, point, firm
        self.live = True

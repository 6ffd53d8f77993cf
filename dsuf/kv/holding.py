"""What is known of an admitted turn: its pages, where the beginning of its prompt comes from, and what it made."""

from typing import TYPE_CHECKING

from dsuf.kv.attach import NOTHING, Source
from dsuf.kv.claims import Lease
from dsuf.kv.point import CommitPoint, HostPage
from dsuf.kv.prefix import Node
from dsuf.kv.trace import Trace
from dsuf.types import Turn

if TYPE_CHECKING:
    from dsuf.kv.keeper import Copy


class Holding:
    """A turn with its page table `pages`, of which those numbered in `shared` may be others' too.

    `trace` is None where its prompt could not be traced: then it neither takes over nor leaves behind. What it takes
    over comes from `page` (and those before it) and `point`, under `lease` until it is copied. `node` is the last of
    its pages that has a place in the index, pinned there. `made` are the commit points that it left behind before it
    was `trusted`: before a step had shown that what it took over is good. `run` is its last one without a state. It
    wants to begin no later than at `limit`. `latest` is the last copy that was begun of it.
    """

    def __init__(self, turn: Turn, trace: Trace | None, limit: int | None, peer_from: int | None) -> None:
        self.turn, self.trace, self.limit = turn, trace, limit
        self.pages: list[int] = []
        self.shared: set[int] = set()
        self.choice = NOTHING
        self.lease: Lease | None = None
        self.point: CommitPoint | None = None
        self.page: HostPage | None = None
        self.node: Node | None = None
        self.trusted = False
        self.failed = False
        self.made: list[CommitPoint] = []
        self.run: CommitPoint | None = None
        self.latest: Copy | None = None
        self._peer_from = peer_from

    def source(self, position: int) -> Source:
        """From where what the arena has of `position` came."""
        return "host" if self._peer_from is None or position < self._peer_from else "peer"

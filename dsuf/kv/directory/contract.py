"""What the rest of a node sees of the directory: members of the fleet, candidates for a prompt, and how it is doing."""

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from dsuf.kv.trace import Trace

Role = Literal["both", "prefill", "decode"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the fleet, by what it tells of itself: `node` is the name that it keeps, `boot` that of the process.

    Peers reach it at `host`:`port` (control connection); `rdma` says whether it could move bytes by RDMA. `running` and
    `waiting` turns, and `room_bytes` of its arena that nothing needs, are as old as its last beat. One that is
    `draining` takes no new turns but still gives away what it keeps.
    """

    node: str
    boot: str
    role: Role = "both"
    host: str = ""
    port: int = 0
    rdma: bool = False
    draining: bool = False
    running: int = 0
    waiting: int = 0
    room_bytes: int = 0

    @property
    def load(self) -> int:
        """Turns that are there."""
        return self.running + self.waiting


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A member that probably keeps the beginning of a prompt: a state from which it can go on at `length` (0: none, and
    up to the few positions that the state can spare less), and at least its first `whole_pages` pages. Where more is
    `coming`, a turn is there that the prompt goes on from, and what it leaves behind is not told yet."""

    member: Member
    length: int = 0
    whole_pages: int = 0
    coming: bool = False

    @property
    def stateful(self) -> bool:
        """Whether it keeps a state that the prompt can use."""
        return self.length > 0

    def start(self, page_tokens: int, replay_tokens: int) -> int:
        """The position from which on a turn would compute with all of it, where an engine replays `replay_tokens`
        behind whole pages (0: whole pages alone are of no use)."""
        replayed = self.whole_pages * page_tokens - replay_tokens if replay_tokens else 0
        return max(self.length, replayed)

    def most(self, prompt: int, page_tokens: int, replay_tokens: int) -> int:
        """The position from which on a turn with a prompt of so many tokens would compute with all that may be there,
        what is coming among it."""
        return prompt - 1 if self.coming else self.start(page_tokens, replay_tokens)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a directory does: `trouble` says what is wrong with it, None while all is well; `since_s` for how long.

    Trouble is to be shown, and is no reason to refuse turns: a node goes on with what it knows.
    """

    trouble: str | None = None
    since_s: float = 0.0


class Directory(Protocol):
    """What is known of the fleet. `find`, `members`, `health` and `counters` only read memory."""

    async def start(self) -> None:
        """Take part. Returns when the fleet is known and knows this node, or after a short time: it goes on then."""

    def find(self, trace: Trace, *, replay_tokens: int = 0) -> list[Candidate]:
        """The other members that keep something of use of `trace`, or will, those with the most first; of equals the
        least loaded. With `replay_tokens` whole pages are of use too."""

    def members(self) -> list[Member]:
        """The other members that live, by name."""

    def health(self) -> Health:
        """Whether the fleet hears of this node and the other way round."""

    def counters(self) -> Mapping[str, int]:
        """`members`, `entries` (of all others), `own` entries, `unsent` changes, `up` (0 or 1)."""

    async def withdraw(self) -> None:
        """Tell the fleet that this node goes, and announce nothing from now on; within a deadline."""

    async def close(self) -> None:
        """Withdraw, unless that was done, and end everything. Idempotent."""

"""The directory of a node in a fleet: what it tells, what it hears, and what it finds there."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from dsuf.kv.arena import Arena
from dsuf.kv.directory.announcer import Announcer
from dsuf.kv.directory.board import Board, BoardFailed
from dsuf.kv.directory.book import Book
from dsuf.kv.directory.contract import Candidate, Health, Member
from dsuf.kv.directory.news import name_of
from dsuf.kv.directory.pace import Pace
from dsuf.kv.directory.reader import Reader
from dsuf.kv.directory.roster import Roster
from dsuf.kv.directory.shelf import Shelf
from dsuf.kv.directory.trouble import Trouble
from dsuf.kv.trace import Trace
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics


class FleetDirectory:
    """Implements `Directory` for the member that `about` tells of, which keeps what is in `arena`, over `board`.

    `about` is asked at every beat; node and boot stay the same.
    """

    def __init__(
        self, board: Board, arena: Arena, about: Callable[[], Member], metrics: Metrics, *, pace: Pace | None = None
    ) -> None:  # fmt: skip
        pace = pace or Pace()
        self._board, self._pace = board, pace
        self._book = Book()
        self._writing, self._reading = Trouble("announcing", pace, metrics), Trouble("listening", pace, metrics)
        self._shelf = Shelf(arena, pace.unsent_entries)
        self._announcer = Announcer(board, self._shelf, about, pace, self._writing)
        self._roster = Roster(name_of(about()), self._book, pace.expiry_s, 2 * pace.beat_s)
        self._reader = Reader(board, self._roster, pace, self._reading, metrics)
        self._tasks: list[asyncio.Task[None]] = []
        self._left = False

    async def start(self) -> None:
        """Take part. Returns when the fleet is known and knows this node, or after a short time: it goes on then."""
        assert not self._tasks, "started before"
        work = ((self._announcer.run, self._writing), (self._reader.run, self._reading))
        self._tasks = [asyncio.create_task(_keep_on(run, trouble)) for run, trouble in work]
        try:
            async with asyncio.timeout(self._pace.start_s):
                await self._announcer.told.wait()
                await self._reader.known.wait()
        except TimeoutError:
            log_event("fleet not reached yet", level="warning", reason=self.health().trouble)

    def find(self, trace: Trace, *, replay_tokens: int = 0) -> list[Candidate]:
        """The other members that keep something of use of `trace`, or will, those with the most first; of equals the
        least loaded."""
        size = trace.page_tokens
        candidates = []
        for holder, found in self._book.find(trace).items():
            member = self._roster.member(holder)
            if member is not None:
                candidate = Candidate(
                    member=member, length=found.length, whole_pages=found.pages, coming=found.coming
                )  # fmt: skip
                if candidate.most(trace.length, size, replay_tokens) > 0:
                    candidates.append(candidate)
        return sorted(
            candidates,
            key=lambda c: (-c.most(trace.length, size, replay_tokens), c.member.load, c.member.node, c.member.boot),
        )

    def members(self) -> list[Member]:
        """The other members that live, by name."""
        return [peer.member for peer in self._roster.known() if peer.member is not None]

    def health(self) -> Health:
        """The worst that is wrong."""
        if self._left:
            return Health()
        if any(task.done() for task in self._tasks):
            return Health(trouble="the directory has stopped")
        for trouble in (self._writing, self._reading):
            if trouble.text is not None:
                return trouble.health()
        if self._announcer.name.node in self._roster.twins:
            return Health(trouble=f"another process calls itself {self._announcer.name.node}")
        return Health()

    def counters(self) -> Mapping[str, int]:
        """`members`, `entries` (of all others), `own` entries, `unsent` changes, `up` (0 or 1)."""
        up = self._writing.text is None and self._reading.text is None
        return {
            "members": len(self._roster.known()),
            "entries": self._book.entries,
            "own": len(self._shelf),
            "unsent": self._announcer.unsent,
            "up": int(up and not self._left),
        }

    async def withdraw(self) -> None:
        """Tell the fleet that this node goes, and announce nothing from now on; within a deadline."""
        if not self._left:
            self._left = True
            self._shelf.close()
            if self._tasks:
                await _stop(self._tasks[:1])
                await self._announcer.leave()

    async def close(self) -> None:
        """Withdraw, unless that was done, and end everything. Idempotent."""
        await self.withdraw()
        await _stop(self._tasks)
        await self._board.close()


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel `tasks`, and wait until they ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_on(run: Callable[[], Coroutine[Any, Any, None]], trouble: Trouble) -> None:
    """`run` until cancelled: should it end of itself, by a fault of ours, a node must not be without it for ever."""
    while True:
        task = asyncio.create_task(run())
        try:
            await asyncio.wait([task])
        finally:
            await _stop([task])
        error = None if task.cancelled() else task.exception()
        log_event("directory stopped", level="error", error=error)
        await asyncio.sleep(trouble.fail(BoardFailed(f"stopped by {type(error or asyncio.CancelledError()).__name__}")))

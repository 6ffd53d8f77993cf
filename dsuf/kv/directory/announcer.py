"""Telling the fleet what this node keeps: the only writer of its record."""

import asyncio
import time
from collections.abc import Callable

from dsuf.kv.directory.board import Board, BoardFailed, Post
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.news import Beat, Change, Farewell, encode_news, name_of
from dsuf.kv.directory.pace import Pace
from dsuf.kv.directory.shelf import Changes, Shelf
from dsuf.kv.directory.trouble import Trouble


class Announcer:
    """Writes what changed on `shelf` to `board`, and beats. `about` says what this member is now.

    What was sent and not answered is sent again as it was, since it may have been applied. Where the record is not
    what it must be, all of it is written anew. `told` is set once all is written for the first time.
    """

    def __init__(
        self, board: Board, shelf: Shelf, about: Callable[[], Member], pace: Pace, trouble: Trouble
    ) -> None:  # fmt: skip
        self.name = name_of(about())
        self.told = asyncio.Event()
        self._board, self._shelf, self._about, self._pace, self._trouble = board, shelf, about, pace, trouble
        self._number = self._edition = self._entries = 0
        self._sent: Post | None = None
        self._lost = True
        self._beat_s = 0.0

    @property
    def unsent(self) -> int:
        """Changes that the record does not have."""
        sent = self._sent
        return self._shelf.unsent + (0 if sent is None else len(sent.added) + len(sent.removed))

    async def run(self) -> None:
        """Tell what changes, until cancelled."""
        while True:
            await self._wait()
            try:
                await (self._write_anew() if self._lost or self._shelf.overflowed else self._send_next())
                self._trouble.clear()
            except BoardFailed as error:
                await asyncio.sleep(self._trouble.fail(error))

    async def leave(self) -> None:
        """Drop the record, after `run` has ended."""
        try:
            async with asyncio.timeout(self._pace.leave_s):
                await self._board.leave(self.name, encode_news(Farewell(self.name)))
        except (BoardFailed, TimeoutError) as error:
            self._trouble.fail(error)

    async def _wait(self) -> None:
        """Wait until there is something to send."""
        if self._lost or self._sent is not None:
            return
        try:
            async with asyncio.timeout(max(0.0, self._beat_s - time.monotonic())):
                await self._shelf.changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._pace.gather_s)

    async def _send_next(self) -> None:
        """Send what was sent last and not answered, or the next changes, or a beat."""
        post = self._sent = self._sent or self._make_post()
        if not await self._board.post(post, self._pace.record_s):
            self._lost = True
            raise BoardFailed(f"its record is not as it was after change {post.before}; it is written anew")
        self._accept(post)

    def _make_post(self) -> Post:
        """The next changes, or a beat where that is due."""
        due = time.monotonic() >= self._beat_s
        changes = Changes() if due else self._shelf.take(self._pace.batch_entries)
        member, number = self._about(), self._number + any(changes)
        news = Change(self.name, number, *changes) if any(changes) else Beat(member, number)
        return Post(
            name=self.name, before=self._number, entries=self._entries, number=number, edition=self._edition,
            member=member, added=changes.added, removed=changes.removed, news=encode_news(news),
        )  # fmt: skip

    def _accept(self, post: Post) -> None:
        """`post` was applied."""
        self._sent = None
        self._number = post.number
        self._entries = post.entries + len(post.added) - len(post.removed)
        if not post.added and not post.removed:
            self._beat_s = time.monotonic() + self._pace.beat_s

    async def _write_anew(self) -> None:
        """Write the whole record.

        Its number is a new one where anything changed that was not told: others have to read it then. A number that
        was sent once, answered or not, never stands for something else.
        """
        last, batch = self._sent, self._pace.batch_entries
        self._lost = True
        self._number = (last.number if last is not None else self._number) + (self.unsent > 0 or self._shelf.overflowed)
        entries = self._shelf.take_all()
        self._sent, self._entries, self._edition = None, len(entries), self._edition + 1
        await self._board.clear(self.name)
        for start in range(0, len(entries), batch):
            await self._board.fill(self.name, entries[start : start + batch], self._pace.record_s)
        member = self._about()
        post = Post(
            name=self.name, before=None, entries=len(entries), number=self._number, edition=self._edition,
            member=member, added=(), removed=(), news=encode_news(Beat(member, self._number)),
        )  # fmt: skip
        if not await self._board.post(post, self._pace.record_s):
            raise BoardFailed("its record was changed while it was written")
        self._lost = False
        self._accept(post)
        self.told.set()

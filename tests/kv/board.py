"""A board in memory, shared by the directories of a test, with faults as planned."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from dsuf.kv.directory.board import BoardFailed, Post, Record
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.news import Name
from dsuf.kv.directory.pace import Pace

PACE = Pace(
    beat_s=0.03, expiry_s=0.3, gather_s=0.001, silence_s=0.2, resync_s=0.02, retry_s=0.01, retry_most_s=0.05,
    start_s=2.0, leave_s=0.5,
)  # fmt: skip


class MemoryRedis:
    """What all boards of a test share. `down`: every call fails; `read_only`: every change does; `drops` says of each
    news and who would hear it whether it is lost. `answers_lost`: changes are applied, and fail all the same."""

    def __init__(self) -> None:
        self.down = self.read_only = self.answers_lost = False
        self.delay_s = 0.0
        self.drops: Callable[[], bool] = lambda: False
        self.entries: dict[Name, set[bytes]] = {}
        self.heads: dict[Name, tuple[int, int, Member]] = {}
        self.listed: set[Name] = set()
        self.subscribers: set[asyncio.Queue[bytes]] = set()
        self.reads = 0

    def lose_data(self) -> None:
        """As a restart without a file does."""
        self.entries.clear()
        self.heads.clear()
        self.listed.clear()

    def send(self, news: bytes) -> None:
        """Let all hear `news`."""
        for queue in self.subscribers:
            if not self.drops():
                queue.put_nowait(news)


class _Subscription:
    """The news for one reader."""

    def __init__(self, redis: MemoryRedis, queue: asyncio.Queue[bytes]) -> None:
        self._redis, self._queue = redis, queue

    async def next(self, timeout_s: float) -> bytes | None:
        """The next news in time."""
        if self._redis.down:
            raise BoardFailed("planned")
        try:
            async with asyncio.timeout(timeout_s / 10):
                return await self._queue.get()
        except TimeoutError:
            return None


class MemoryBoard:
    """Implements `Board` for one node."""

    def __init__(self, redis: MemoryRedis) -> None:
        self.redis = redis
        self.closed = False

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[_Subscription]:
        await self._call(writes=False)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.redis.subscribers.add(queue)
        try:
            yield _Subscription(self.redis, queue)
        finally:
            self.redis.subscribers.discard(queue)

    async def post(self, post: Post, expiry_s: float) -> bool:
        await self._call()
        redis, entries = self.redis, self.redis.entries.setdefault(post.name, set())
        number = redis.heads[post.name][0] if post.name in redis.heads else None
        if number != post.before and number != post.number:
            return False
        if number != post.number or post.before == post.number:
            if len(entries) != post.entries:
                return False
            entries |= set(post.added)
            entries -= set(post.removed)
        redis.heads[post.name] = (post.number, post.edition, post.member)
        redis.listed.add(post.name)
        redis.send(post.news)
        if redis.answers_lost:
            raise BoardFailed("planned: no answer")
        return True

    async def clear(self, name: Name) -> None:
        await self._call()
        self.redis.entries.pop(name, None)
        self.redis.heads.pop(name, None)

    async def fill(self, name: Name, entries: Sequence[bytes], expiry_s: float) -> None:
        await self._call()
        self.redis.entries.setdefault(name, set()).update(entries)

    async def leave(self, name: Name, news: bytes) -> None:
        await self._call()
        self.redis.entries.pop(name, None)
        self.redis.heads.pop(name, None)
        self.redis.listed.discard(name)
        self.redis.send(news)

    async def names(self) -> list[Name]:
        await self._call(writes=False)
        return sorted(self.redis.listed, key=str)

    async def read(self, name: Name) -> Record | None:
        self.redis.reads += 1
        await self._call(writes=False)
        if name not in self.redis.heads:
            return None
        number, _, member = self.redis.heads[name]
        return Record(member=member, number=number, entries=frozenset(self.redis.entries[name]))

    async def forget(self, name: Name) -> None:
        await self._call()
        if name not in self.redis.heads:
            self.redis.listed.discard(name)

    async def close(self) -> None:
        self.closed = True

    async def _call(self, writes: bool = True) -> None:
        await asyncio.sleep(self.redis.delay_s)
        if self.redis.down or (writes and self.redis.read_only):
            raise BoardFailed("planned")

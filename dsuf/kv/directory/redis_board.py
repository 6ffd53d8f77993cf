"""The board of a fleet in Redis: a hash a member, one set of their names, one channel.

All keys share a hash tag, so a cluster keeps them in one place and a script may change them together. A user needs
`+@connection +eval +hget +hset +hdel +hlen +hmget +hscan +pexpire +sadd +srem +smembers +exists +del +publish
+subscribe +unsubscribe`, the keys `{prefix}:*` and the channel `{prefix}:*`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from dsuf.kv.directory.address import RedisAddress
from dsuf.kv.directory.board import BoardFailed, Post, Record
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.entry import is_entry
from dsuf.kv.directory.news import Name
from dsuf.kv.directory.redis_client import RedisClient

CALL_S = 2.0
SCAN_ENTRIES = 1000
MOST_ENTRIES = 4_000_000
_HEAD = ("#", "!", "@")  # number, edition, member: fields beside the entries, which are longer

_POST = """
local at = redis.call('HGET', KEYS[1], '#') or ''
if at ~= ARGV[4] or ARGV[2] == ARGV[4] then
  local size = redis.call('HLEN', KEYS[1])
  if at ~= '' then size = size - 3 end
  if at ~= ARGV[2] or size ~= tonumber(ARGV[3]) then return 0 end
  for i = 11, #ARGV do
    if i - 10 <= tonumber(ARGV[10]) then
      redis.call('HSET', KEYS[1], ARGV[i], '')
    else
      redis.call('HDEL', KEYS[1], ARGV[i])
    end
  end
  redis.call('HSET', KEYS[1], '#', ARGV[4], '!', ARGV[5], '@', ARGV[6])
end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
redis.call('PUBLISH', ARGV[8], ARGV[9])
return 1
"""
_LEAVE = """
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[2], ARGV[3])
return 1
"""


class RedisSubscription:
    """The news of one channel, on a connection of its own."""

    def __init__(self, board: "RedisBoard", pubsub: Any) -> None:
        self._board, self._pubsub = board, pubsub

    async def next(self, timeout_s: float) -> bytes | None:
        """The next news, None where none came in time; raises `BoardFailed` where the connection is gone."""
        message = await self._board.ask(self._pubsub.get_message(timeout=timeout_s), timeout_s)
        return message["data"] if message is not None and message["type"] == "message" else None

    async def begin(self, channel: str) -> None:
        """Subscribe, until the server confirms it."""
        await self._board.ask(self._pubsub.subscribe(channel))
        message = await self._board.ask(self._pubsub.get_message(timeout=self._board.call_s))
        if message is None or message["type"] != "subscribe":
            raise BoardFailed(f"{self._board.shown}: no subscription to {channel}")

    async def end(self) -> None:
        """Close the connection."""
        with suppress(BoardFailed):  # it may be gone already
            await self._board.ask(self._pubsub.aclose())


class RedisBoard:
    """Implements `Board` at `address`; each call ends within about `call_s`."""

    def __init__(self, address: RedisAddress, *, call_s: float = CALL_S) -> None:
        self.shown, self.call_s = address.shown, call_s
        self._base = f"{{{address.prefix}}}:1"
        self._names, self._channel = f"{self._base}:names", f"{self._base}:news"
        self._client = RedisClient(address, call_s)
        self._redis = self._client.redis

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[RedisSubscription]:
        """All news from the moment on at which the context was entered."""
        if self._client.address.kind == "cluster":
            await self.ask(self._redis.initialize())
        subscription = RedisSubscription(self, self._redis.pubsub())
        try:
            await subscription.begin(self._channel)
            yield subscription
        finally:
            await subscription.end()

    async def post(self, post: Post, expiry_s: float) -> bool:
        """Apply `post` in one go, let the record live for `expiry_s`, and send the news; False where it does not
        apply."""
        before = "" if post.before is None else str(post.before)
        return await self._run(
            _POST, post.name, before, post.entries, post.number, post.edition, msgspec.msgpack.encode(post.member),
            int(1000 * expiry_s), self._channel, post.news, len(post.added), *post.added, *post.removed,
        )  # fmt: skip

    async def clear(self, name: Name) -> None:
        """Drop the record of `name`."""
        await self.ask(self._redis.delete(self._key(name)))

    async def fill(self, name: Name, entries: Sequence[bytes], expiry_s: float) -> None:
        """Add to the record of `name` that is being written anew."""
        key = self._key(name)
        await self.ask(self._redis.hset(key, mapping=dict.fromkeys(entries, b"")))
        await self.ask(self._redis.pexpire(key, int(1000 * expiry_s)))

    async def leave(self, name: Name, news: bytes) -> None:
        """Drop the record and the name, and send the last news."""
        await self._run(_LEAVE, name, self._channel, news)

    async def names(self) -> list[Name]:
        """Who has, or had, a record."""
        found = []
        for data in await self.ask(self._redis.smembers(self._names)):
            try:
                found.append(msgspec.json.decode(data, type=Name))
            except msgspec.DecodeError:
                continue  # not ours
        return sorted(found, key=str)

    async def read(self, name: Name) -> Record | None:
        """The record of `name`, in parts, so that Redis serves others meanwhile: what changes while it is read comes as
        news with a later number. None where there is none, or it was written anew meanwhile."""
        key = self._key(name)
        number, edition, data = await self.ask(self._redis.hmget(key, _HEAD))
        if number is None or edition is None or data is None:
            return None
        entries: set[bytes] = set()
        cursor = 0
        while True:
            cursor, fields = await self.ask(self._redis.hscan(key, cursor, count=SCAN_ENTRIES))
            entries.update(filter(is_entry, fields))
            if len(entries) > MOST_ENTRIES:
                raise BoardFailed(f"{self.shown}: the record of {name} has over {MOST_ENTRIES} entries")
            if not cursor:
                break
        if (await self.ask(self._redis.hmget(key, _HEAD)))[1] != edition:
            return None
        try:
            member = msgspec.msgpack.decode(data, type=Member)
            return Record(member=member, number=int(number), entries=frozenset(entries))
        except ValueError as error:
            raise BoardFailed(f"{self.shown}: the record of {name} cannot be read") from error

    async def forget(self, name: Name) -> None:
        """Drop the name, if it has no record."""
        if not await self.ask(self._redis.exists(self._key(name))):
            await self.ask(self._redis.srem(self._names, msgspec.json.encode(name)))

    async def close(self) -> None:
        """End all connections. Idempotent."""
        with suppress(BoardFailed):  # they may be gone already
            await self.ask(self._client.close())

    async def ask(self, call: Awaitable[Any], more_s: float = 0.0) -> Any:
        """What `call` gives; raises `BoardFailed` where that is an error, or took longer than `call_s` and `more_s`.

        Whatever the library raises while Redis goes and comes is such an error: who asks must go on.
        """
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            async with asyncio.timeout(self.call_s + more_s):
                return await call
        except TimeoutError as error:
            raise BoardFailed(f"{self.shown}: no answer within {self.call_s + more_s:g} s") from error
        except asyncio.CancelledError as error:
            if task.cancelling() > cancels:
                raise
            # Something within the library was cancelled, and not who asked.
            raise BoardFailed(f"{self.shown}: the call was given up") from error
        except Exception as error:
            raise BoardFailed(f"{self.shown}: {_describe(error)}") from error
        finally:
            # `asyncio.wait_for`, which the library uses, loses a cancellation up to Python 3.11 where what it waits for
            # ends at the same time: who was to end would go on for ever.
            if task.cancelling() > cancels:
                raise asyncio.CancelledError

    async def _run(self, script: str, name: Name, *arguments: Any) -> bool:
        """What a script says that is given the record, the names and `name`."""
        data = msgspec.json.encode(name)
        return bool(await self.ask(self._redis.eval(script, 2, self._key(name), self._names, data, *arguments)))

    def _key(self, name: Name) -> str:
        """The record of `name`."""
        return f"{self._base}:record:{name.node}:{name.boot}"


def _describe(error: Exception) -> str:
    """What went wrong, on one short line."""
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__

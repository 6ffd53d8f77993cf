"""Where members of a fleet keep their records and hear each other's news: what the directory asks of it."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from dsuf.errors import DsufError
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.news import Name


class BoardFailed(DsufError):
    """The board did not do, or not in time, what it was asked; nobody knows whether it still will."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a member as it was after `number` changes."""

    member: Member
    number: int
    entries: frozenset[bytes]


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the record of `name`, and the `news` of it.

    It applies to a record that has seen `before` changes, none at all where that is None, and holds `entries` entries.
    After it the record has seen `number` changes and tells of `member`. `edition` counts how often it was written anew.
    """

    name: Name
    before: int | None
    entries: int
    number: int
    edition: int
    member: Member
    added: Sequence[bytes]
    removed: Sequence[bytes]
    news: bytes


class Subscription(Protocol):
    """News as they come."""

    async def next(self, timeout_s: float) -> bytes | None:
        """The next news, None where none came in time; raises `BoardFailed` where none will come any more."""


class Board(Protocol):
    """Records by name, and one channel of news. Every call ends within a deadline, and raises `BoardFailed`."""

    def subscribe(self) -> AbstractAsyncContextManager[Subscription]:
        """All news from the moment on at which the context was entered."""

    async def post(self, post: Post, expiry_s: float) -> bool:
        """Apply `post` in one go, let the record live for `expiry_s`, and send the news; False where it does not apply.

        True also where it was applied before: it can be sent again by who knows of no answer.
        """

    async def clear(self, name: Name) -> None:
        """Drop the record of `name`."""

    async def fill(self, name: Name, entries: Sequence[bytes], expiry_s: float) -> None:
        """Add to the record of `name` that is being written anew; nobody reads it before the next `post`."""

    async def leave(self, name: Name, news: bytes) -> None:
        """Drop the record and the name, and send the last news."""

    async def names(self) -> list[Name]:
        """Who has, or had, a record."""

    async def read(self, name: Name) -> Record | None:
        """The record of `name`; None where there is none, or it is just being written."""

    async def forget(self, name: Name) -> None:
        """Drop the name, if it has no record."""

    async def close(self) -> None:
        """End all connections. Idempotent."""

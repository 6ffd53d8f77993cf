"""What nodes announce to each other: msgpack on one channel. What cannot be read is nobody's news."""

import msgspec

from dsuf.errors import DsufError
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.entry import is_entry


class Name(msgspec.Struct, frozen=True, array_like=True):
    """A node in one of its boots."""

    node: str
    boot: str

    def __str__(self) -> str:
        return f"{self.node}/{self.boot}"


class Change(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The entries of `name` changed for the `number`th time."""

    name: Name
    number: int
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """`member` lives, and its entries changed `number` times so far."""

    member: Member
    number: int

    @property
    def name(self) -> Name:
        """Who it is."""
        return name_of(self.member)


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """`name` goes and keeps nothing."""

    name: Name


News = Change | Beat | Farewell

_decoder = msgspec.msgpack.Decoder(News)


class NotNews(DsufError):
    """Bytes that are no announcement of this version."""


def name_of(member: Member) -> Name:
    """The name of `member` in its boot."""
    return Name(member.node, member.boot)


def encode_news(news: News) -> bytes:
    """`news` as bytes."""
    return msgspec.msgpack.encode(news)


def decode_news(data: bytes) -> News:
    """The announcement in `data`; raises `NotNews`."""
    try:
        news = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise NotNews(f"{len(data)} bytes that are no announcement: {error}") from error
    if isinstance(news, Change) and not all(map(is_entry, (*news.added, *news.removed))):
        raise NotNews(f"a change of {news.name} with what is no entry")
    return news

"""What is told of a prefix, as bytes: the digest of whole pages, or of what a commit point needs of a prompt.

An entry means the same on every node, so equal ones are told once, and are compared and stored without being read.
"""

import struct
from collections.abc import Iterable, Iterator

import msgspec

from dsuf.kv.point import CommitPoint, HostPage
from dsuf.kv.trace import END_TOKENS, ID_BYTES, Trace, digest
from dsuf.types import Span

PAGE_BYTES = 16
STRIDE_PAGES = 8
"""Of the pages of a branch each one whose number is a multiple of this is told, and the last one."""
_POINT = struct.Struct(">16s16s16sIIIB")
POINT_BYTES = _POINT.size
_REPEATS, _COMING = 1, 2


class PointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A state at `length` that stands on the whole pages of the chain digest `anchor`.

    A prompt has no use of it unless it shares the next `rest_tokens` tokens, and the pictures that begin in them:
    `rest` is their digest; `whole` is that of all up to `length`. `spare` says how many of the last positions any
    prompt can do without, `repeats` is that of the state. One that is `coming` is no state: a turn is there whose
    prompt has these tokens, and leaves one behind them, nobody knows yet where.
    """

    anchor: bytes
    rest: bytes
    whole: bytes
    rest_tokens: int
    length: int
    spare: int
    repeats: bool
    coming: bool = False

    def encode(self) -> bytes:
        """The entry as bytes."""
        return _POINT.pack(
            self.anchor, self.rest, self.whole, self.rest_tokens, self.length, self.spare,
            _REPEATS * self.repeats + _COMING * self.coming,
        )  # fmt: skip


def describe_page(page: HostPage) -> bytes:
    """The entry of the pages up to `page`: the chain digest."""
    return page.node.digest


def describe_point(point: CommitPoint) -> bytes:
    """The entry of a commit point with a state."""
    head, anchor = point.head, point.anchor.digest
    rest_tokens = max(0, head.length - head.off_tokens - head.anchor_tokens)
    start, tokens = head.anchor_tokens, head.length - head.anchor_tokens
    return PointEntry(
        anchor=anchor, rest=_digest_rest(anchor, head.ids, head.spans, start, rest_tokens),
        whole=_digest_rest(anchor, head.ids, head.spans, start, tokens), rest_tokens=rest_tokens, length=head.length,
        spare=head.off_tokens, repeats=head.repeats,
    ).encode()  # fmt: skip


def describe_coming(prompt: Trace) -> bytes:
    """The entry of a turn with this prompt; b"" where that is too short to be of use to others."""
    length = prompt.length - END_TOKENS
    if length < prompt.page_tokens:
        return b""
    pages, rest_tokens = divmod(length, prompt.page_tokens)
    rest = digest_rest(prompt, pages, rest_tokens)
    return PointEntry(
        anchor=prompt.chain[pages], rest=rest, whole=rest, rest_tokens=rest_tokens, length=length, spare=0,
        repeats=False, coming=True,
    ).encode()  # fmt: skip


def digest_rest(trace: Trace, pages: int, tokens: int) -> bytes:
    """The digest of the `tokens` tokens of `trace` after its first `pages` pages, as entries have it; b"" where it has
    less."""
    start = pages * trace.page_tokens
    if start + tokens > trace.length:
        return b""
    ids = trace.ids[start * ID_BYTES : (start + tokens) * ID_BYTES]
    return _digest_rest(trace.chain[pages], ids, trace.spans, start, tokens)


def is_entry(entry: bytes) -> bool:
    """Whether `entry` could be one."""
    return len(entry) in (PAGE_BYTES, POINT_BYTES)


def read_point(entry: bytes) -> PointEntry | None:
    """The commit point that `entry` tells of, or the turn that will leave one; None where it tells of pages."""
    if len(entry) == PAGE_BYTES:
        return None
    anchor, rest, whole, rest_tokens, length, spare, flags = _POINT.unpack(entry)
    return PointEntry(
        anchor=anchor, rest=rest, whole=whole, rest_tokens=rest_tokens, length=length, spare=spare,
        repeats=bool(flags & _REPEATS), coming=bool(flags & _COMING),
    )  # fmt: skip


def split_points(entries: bytes) -> Iterator[bytes]:
    """The entries of commit points that stand end to end in `entries`; a single one is the same object."""
    for start in range(0, len(entries), POINT_BYTES):
        yield entries[start : start + POINT_BYTES]


def _digest_rest(anchor: bytes, ids: bytes, spans: Iterable[Span], start: int, tokens: int) -> bytes:
    """The digest of the first `tokens` of `ids`, which begin at position `start`, and of the pictures that begin
    there. A picture that begins before is in the digest of its pages."""
    shown = [[s.start, s.stop, s.digest.hex()] for s in sorted(spans, key=lambda s: s.start)
             if start <= s.start < start + tokens]  # fmt: skip
    return digest(anchor, ids[: tokens * ID_BYTES] + (msgspec.json.encode(shown) if shown else b""))

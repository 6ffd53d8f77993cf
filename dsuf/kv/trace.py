"""What a cache depends on, position by position: tokens and pictures, under a fingerprint and a tenant's salt.

Its digests form a chain over pages, so one digest stands for everything up to the end of its page.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dsuf.types import CacheLayout, Prompt, Span

ID_BYTES = 8
DIGEST_BYTES = 16
END_TOKENS = 8
"""So many of the last tokens of a prompt may stand otherwise in the next one, such as where it opens the reply."""
_PIECE_TOKENS = 16_384


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tokens (`ids`: 8 bytes each, little-endian) with its pictures, cut into pages.

    `chain[k]` stands for the first k whole pages, and `chain[0]` for `head` alone: fingerprint, salt and page size.
    `shown` holds, of the pages with pictures, what is to be seen of them.
    """

    head: bytes
    page_tokens: int
    ids: bytes
    spans: tuple[Span, ...]
    shown: Mapping[int, bytes]
    chain: tuple[bytes, ...]

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.ids) // ID_BYTES

    def content(self, page: int) -> bytes:
        """What whole page number `page` holds: its ids, then its pictures."""
        size = self.page_tokens * ID_BYTES
        return self.ids[page * size : (page + 1) * size] + self.shown.get(page, b"")


def trace_prompt(layout: CacheLayout, prompt: Prompt) -> Trace:
    """The trace of a prompt. Its ids are converted piece by piece, since all other threads stand still meanwhile."""
    starts = range(0, len(prompt.ids), _PIECE_TOKENS)
    ids = b"".join(np.array(prompt.ids[start : start + _PIECE_TOKENS], "<i8").tobytes() for start in starts)
    return make_trace(layout, prompt.salt, ids, prompt.spans)


def make_trace(layout: CacheLayout, salt: str, ids: bytes, spans: Iterable[Span], links: bytes = b"") -> Trace:
    """The trace of `ids`, with those of `spans` that begin within them.

    `links` are the digests of all whole pages, if somebody has told them, and are believed: with such a trace things
    may be looked up, since contents decide then, but not kept.
    """
    head = msgspec.json.encode([layout.fingerprint, salt, layout.page_tokens])
    told = len(links) == len(ids) // (layout.page_tokens * ID_BYTES) * DIGEST_BYTES
    starts = range(0, len(links), DIGEST_BYTES) if told else ()
    chain = (digest(b"", head), *[links[start : start + DIGEST_BYTES] for start in starts])
    return _trace(head, layout.page_tokens, ids, spans, chain)


def follow_trace(trace: Trace, ids: bytes, spans: Iterable[Span]) -> Trace:
    """As `make_trace`, for `ids` that go on from `trace` or end within it: its links are not made again."""
    size = trace.page_tokens * ID_BYTES
    same = min(len(ids), len(trace.ids)) // size if ids[: len(trace.ids)] == trace.ids[: len(ids)] else 0
    return _trace(trace.head, trace.page_tokens, ids, spans, trace.chain[: same + 1])


def branch_trace(trace: Trace, pages: int, ids: bytes, spans: Iterable[Span]) -> Trace:
    """The first `pages` pages of `trace`, and `ids` behind them; `spans` are those of the whole, and up to there the
    same as in `trace`."""
    kept = trace.ids[: pages * trace.page_tokens * ID_BYTES]
    return _trace(trace.head, trace.page_tokens, kept + ids, spans, trace.chain[: pages + 1])


def common_tokens(a: Trace, b: Trace) -> int:
    """How many first positions hold the same in both: tokens, and pictures as a whole."""
    return common_after(0, a.ids, a.spans, b) if a.head == b.head else 0


def goes_on(prompt: Trace, before: Trace) -> bool:
    """Whether `prompt` begins with the prompt `before`, but perhaps for its very end."""
    return common_tokens(before, prompt) >= max(1, before.length - END_TOKENS)


def common_after(start: int, ids: bytes, spans: Iterable[Span], trace: Trace) -> int:
    """As `common_tokens`, for a sequence that is known to share the first `start` positions of `trace` and goes on with
    `ids`; `spans` are those of the whole sequence."""
    other = trace.ids[start * ID_BYTES : start * ID_BYTES + len(ids)]
    ids = ids[: len(other)]
    same = len(ids) // ID_BYTES
    if ids != other:
        same = int(np.argmax(np.frombuffer(ids, np.int64) != np.frombuffer(other, np.int64)))
    differ = (span.start for span in set(spans) ^ set(trace.spans) if span.start >= start)
    return min([start + same, *differ])


def digest(previous: bytes, content: bytes) -> bytes:
    """The link of the chain after `previous`."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=previous).digest()


def _trace(head: bytes, page_tokens: int, ids: bytes, spans: Iterable[Span], chain: tuple[bytes, ...]) -> Trace:
    """A trace whose first links are `chain`."""
    within = tuple(sorted((s for s in spans if s.start * ID_BYTES < len(ids)), key=lambda span: span.start))
    bare = Trace(
        head=head, page_tokens=page_tokens, ids=ids, spans=within, shown=_show(within, page_tokens), chain=chain
    )
    return msgspec.structs.replace(bare, chain=(*chain, *_link(bare)))


def _show(spans: Sequence[Span], page_tokens: int) -> dict[int, bytes]:
    """By page, the pictures that reach into it."""
    pages: dict[int, list[object]] = {}
    for span in spans:
        for page in range(span.start // page_tokens, (span.stop - 1) // page_tokens + 1):
            pages.setdefault(page, []).append([span.start, span.stop, span.digest.hex()])
    return {page: msgspec.json.encode(shown) for page, shown in pages.items()}


def _link(trace: Trace) -> Iterator[bytes]:
    """The links that `trace` does not have yet."""
    last = trace.chain[-1]
    for page in range(len(trace.chain) - 1, trace.length // trace.page_tokens):
        last = digest(last, trace.content(page))
        yield last

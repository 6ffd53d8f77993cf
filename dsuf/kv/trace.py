"""What a cache depends on, position by position: tokens and pictures, under a fingerprint and a tenant's salt.

Its digests form a chain over blocks of tokens, so one digest stands for everything up to the end of its block.
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from dsuf.types import Prompt, Span

BLOCK_TOKENS = 64
_ID_BYTES = 8


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tokens (`ids`: 8 bytes each, little-endian) with its pictures.

    `chain[k]` stands for the first k blocks, and `chain[0]` for fingerprint and salt alone.
    """

    fingerprint: str
    salt: str
    ids: bytes
    spans: tuple[Span, ...]
    chain: tuple[bytes, ...]

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.ids) // _ID_BYTES


def trace_prompt(fingerprint: str, prompt: Prompt) -> Trace:
    """The trace of a prompt."""
    ids = np.array(prompt.ids, "<i8").tobytes()
    return make_trace(fingerprint, prompt.salt, ids, prompt.spans)


def make_trace(fingerprint: str, salt: str, ids: bytes, spans: Sequence[Span]) -> Trace:
    """The trace of `ids`, with those of `spans` that begin within them."""
    within = tuple(sorted((s for s in spans if s.start * _ID_BYTES < len(ids)), key=lambda span: span.start))
    chain = tuple(_link(fingerprint, salt, ids, within))
    return Trace(fingerprint=fingerprint, salt=salt, ids=ids, spans=within, chain=chain)


def common_tokens(a: Trace, b: Trace) -> int:
    """How many first positions hold the same in both: tokens, and pictures as a whole."""
    if (a.fingerprint, a.salt) != (b.fingerprint, b.salt):
        return 0
    size = min(len(a.ids), len(b.ids))
    same = size // _ID_BYTES
    if a.ids[:size] != b.ids[:size]:
        differs = np.frombuffer(a.ids[:size], np.int64) != np.frombuffer(b.ids[:size], np.int64)
        same = int(np.argmax(differs))
    return min([same, *(span.start for span in set(a.spans) ^ set(b.spans))])


def digest(previous: bytes, content: bytes) -> bytes:
    """The link of the chain after `previous`."""
    return hashlib.blake2b(content, digest_size=16, key=previous).digest()


def _link(fingerprint: str, salt: str, ids: bytes, spans: Sequence[Span]) -> Iterator[bytes]:
    """The chain."""
    last = digest(b"", msgspec.json.encode([fingerprint, salt]))
    yield last
    for block in range(len(ids) // _ID_BYTES // BLOCK_TOKENS):
        start, stop = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
        shown = [[s.start, s.stop, s.digest.hex()] for s in spans if s.start < stop and s.stop > start]
        last = digest(last, ids[start * _ID_BYTES : stop * _ID_BYTES] + msgspec.json.encode(shown))
        yield last

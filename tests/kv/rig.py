"""Small caches, and engines that give and take them."""

from collections.abc import Sequence

import numpy as np

from dsuf.kv.arena import Arena
from dsuf.kv.entry import Entry, checksum
from dsuf.kv.trace import Trace, make_trace
from dsuf.types import SessionCache, Span

FINGERPRINT = "scripted"


def make_cache(ids: Sequence[int], *, spare: int = 0, repeats: bool = False, rows: int = 100) -> SessionCache:
    """A cache of these ids with `rows` bytes of rows."""
    return SessionCache(
        fingerprint=FINGERPRINT, length=len(ids), ids=np.array(ids, "<i8").tobytes(), parts={"rows": bytes(rows)},
        spare=spare, repeats=repeats,
    )  # fmt: skip


def make_prompt_trace(
    ids: Sequence[int], *, fingerprint: str = FINGERPRINT, salt: str = "", spans: tuple[Span, ...] = ()
) -> Trace:
    """The trace of a prompt."""
    return make_trace(fingerprint, salt, np.array(ids, "<i8").tobytes(), spans)


def put(
    arena: Arena, ids: Sequence[int], *, salt: str = "", spans: tuple[Span, ...] = (), spare: int = 0,
    repeats: bool = False, rows: int = 100,
) -> Entry | None:  # fmt: skip
    """Keep a cache; None where there is no room."""
    cache = make_cache(ids, spare=spare, repeats=repeats, rows=rows)
    entry = arena.reserve(make_prompt_trace(ids, salt=salt, spans=spans), cache)
    if entry is not None:
        arena.publish(entry, checksum(cache))
    return entry

"""A session's cache as it moves between places: the layout, a state, and pieces of a prefix.

The global cache of a turn, which grows with its positions, lies in *pages* of `page_tokens` positions. Everything else
that the next token depends on (windows, half groups, draft rows) is a *state*: it belongs to one length.
"""

from typing import Literal

import msgspec


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine keeps the caches of its turns.

    `fingerprint` names weights, formats and way of prefilling: caches of another one are of no use. The device has
    `pages` pages, of `page_bytes` each; a state takes at most `state_bytes`. A step may write up to `overrun_tokens`
    positions past a turn's last. Without a state an engine resumes by computing the last `replay_tokens` positions
    again, or not at all where that is 0.
    """

    fingerprint: str
    page_tokens: int
    page_bytes: int
    pages: int
    state_bytes: int
    overrun_tokens: int = 0
    replay_tokens: int = 0

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_tokens)


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn needs, beside its pages, to go on after `length` positions as if it had computed them itself.

    `ids` holds the token ids of the positions, 8 bytes each, little-endian. Up to `spare` of the last positions may be
    left off and the result is still a state that the session went through. Up to `near` of them, where that is more,
    leave one in which windows begin where those of the session do: as near to a cold run as a replayed window is. Where
    `repeats` is set, a prompt that ends at `length` exactly may leave off its last position, whatever `spare` says.
    """

    fingerprint: str
    length: int
    ids: bytes
    payload: bytes
    spare: int = 0
    near: int = 0
    repeats: bool = False


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a prefix, positions `start` to `stop` (exclusive), and where its cache rows are."""

    key: bytes
    start: int
    stop: int
    source: Literal["device", "host", "peer", "none"]

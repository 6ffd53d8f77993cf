"""The index over commit points: which of them serves a prompt best."""

from typing import NamedTuple

from dsuf.kv.attach import usable_tokens
from dsuf.kv.entry import Entry
from dsuf.kv.trace import BLOCK_TOKENS, Trace, common_tokens


class Match(NamedTuple):
    """An entry and the positions of it that the prompt can use."""

    entry: Entry
    length: int


class PrefixIndex:
    """Entries by the digest of the blocks that a prompt must share with them to have any use of them."""

    def __init__(self) -> None:
        self._entries: dict[bytes, list[Entry]] = {}
        self._most_spare = 0

    def add(self, entry: Entry) -> None:
        """Let `entry` be found."""
        self._entries.setdefault(_digest(entry), []).append(entry)
        self._most_spare = max(self._most_spare, entry.cache.spare)

    def remove(self, entry: Entry) -> None:
        """Let `entry` be found no more; it is in the index."""
        entries = self._entries[_digest(entry)]
        entries.remove(entry)
        if not entries:
            del self._entries[_digest(entry)]

    def find(self, prompt: Trace) -> Match | None:
        """The entry of which `prompt` can use the most positions, the shortest of several; None if there is none."""
        best: Match | None = None
        for blocks in range(len(prompt.chain) - 1, -1, -1):
            for entry in self._entries.get(prompt.chain[blocks], ()):
                found = Match(entry, usable_tokens(entry.cache, common_tokens(entry.trace, prompt), prompt.length))
                if best is None or (found.length, -entry.cache.length) > (best.length, -best.entry.cache.length):
                    best = found
            # Entries further down need fewer blocks to be of use, so they are no longer than this.
            if best is not None and best.length >= blocks * BLOCK_TOKENS + self._most_spare:
                break
        return best if best is not None and best.length > 0 else None

    def find_exact(self, trace: Trace, length: int) -> Entry | None:
        """The entry that holds the first `length` positions of `trace` and no more."""
        return next(
            (
                entry
                for blocks in range(min(length // BLOCK_TOKENS, len(trace.chain) - 1), -1, -1)
                for entry in self._entries.get(trace.chain[blocks], ())
                if entry.cache.length == length and common_tokens(entry.trace, trace) >= length
            ),
            None,
        )


def _digest(entry: Entry) -> bytes:
    """The digest of the whole blocks within the shortest length at which `entry` is of use."""
    return entry.trace.chain[max(0, entry.cache.length - entry.cache.spare) // BLOCK_TOKENS]

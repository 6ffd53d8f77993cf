"""A commit point in the arena, and its checksum."""

import hashlib
from typing import Literal

import msgspec

from dsuf.errors import CheckpointError
from dsuf.kv.trace import Trace
from dsuf.types import SessionCache

State = Literal["absent", "filling", "ready", "dying"]
"""Not (or no longer) kept, written but not found, found, and not found but still in use. Leases count the uses."""

_OVERHEAD_BYTES = 2048


class Entry:
    """A session's cache with what it is found by. Only the arena changes it."""

    def __init__(self, trace: Trace, cache: SessionCache) -> None:
        self.trace, self.cache = trace, cache
        self.bytes = size_bytes(cache)
        self.state: State = "filling"
        self.leases = 0
        self.uses = 0
        self.worth = 0.0
        self.checksum = b""


class DamagedCache(CheckpointError):
    """A kept cache is not what was written."""


def size_bytes(cache: SessionCache) -> int:
    """What keeping `cache` costs. Its ids count twice: the trace has them too, with digests."""
    return _OVERHEAD_BYTES + 2 * len(cache.ids) + sum(map(len, cache.parts.values()))


def checksum(cache: SessionCache) -> bytes:
    """A digest over everything in `cache`."""
    state = hashlib.blake2b(digest_size=16)
    names = [[name, len(part)] for name, part in cache.parts.items()]
    head = [cache.fingerprint, cache.length, cache.spare, cache.repeats, len(cache.ids), names]
    state.update(msgspec.json.encode(head))
    for part in (cache.ids, *cache.parts.values()):
        state.update(part)
    return state.digest()


def verify(entry: Entry) -> None:
    """Raise `DamagedCache` if the cache of `entry` is not the one that its checksum was taken of."""
    if checksum(entry.cache) != entry.checksum:
        raise DamagedCache(f"a kept cache of {entry.cache.length} positions fails its checksum")

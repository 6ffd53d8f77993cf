"""The host store of commit points: a budget of bytes, and the states of what is kept.

absent -> filling (`reserve`) -> ready (`publish`) <-> leased (`lease`, `release`); `withdraw` makes what is leased
dying until its last lease is returned, and everything else absent. All methods run on the event loop.
"""

from collections.abc import Mapping

from dsuf.kv.entry import Entry, size_bytes
from dsuf.kv.prefix import PrefixIndex
from dsuf.kv.trace import Trace
from dsuf.types import SessionCache


class Arena:
    """Entries within `budget_bytes`. `index` holds exactly the ready ones. `evicted` counts those that had to go."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.index = PrefixIndex()
        self.evicted = 0
        self._entries: dict[Entry, None] = {}  # oldest first, which decides between equals
        self._bytes = 0
        self._floor = 0.0

    def reserve(self, trace: Trace, cache: SessionCache) -> Entry | None:
        """A filling entry for `cache`, or None where there is no room: what is leased, filling or dying stays.

        Entries of the least worth make room, but none goes if it would not be enough.
        """
        wanted = self._bytes + size_bytes(cache) - self.budget_bytes
        going = []
        for entry in sorted((e for e in self._entries if _may_go(e)), key=lambda entry: entry.worth):
            if wanted <= 0:
                break
            going.append(entry)
            wanted -= entry.bytes
        if wanted > 0:
            return None
        for entry in going:
            self._floor = max(self._floor, entry.worth)
            self.withdraw(entry)
        self.evicted += len(going)
        entry = Entry(trace, cache)
        self._entries[entry] = None
        self._bytes += entry.bytes
        return entry

    def publish(self, entry: Entry, checksum: bytes) -> None:
        """Let a filling entry be found; one that was withdrawn meanwhile stays away."""
        if entry.state == "filling":
            entry.checksum, entry.state = checksum, "ready"
            self._value(entry)
            self.index.add(entry)

    def lease(self, entry: Entry) -> None:
        """Keep a ready entry until `release`."""
        assert entry.state == "ready", entry.state
        entry.leases += 1

    def release(self, entry: Entry) -> None:
        """Return a lease."""
        assert entry.leases > 0
        entry.leases -= 1
        if entry.state == "dying" and not entry.leases:
            self._drop(entry)

    def credit(self, entry: Entry) -> None:
        """`entry` was of use, or would have been made again."""
        entry.uses += 1
        self._value(entry)

    def withdraw(self, entry: Entry) -> None:
        """Let `entry` be found no more, and drop it as soon as nobody uses it; idempotent."""
        if entry.state == "ready":
            self.index.remove(entry)
        if entry.state in ("ready", "filling"):
            entry.state = "dying"
            if not entry.leases:
                self._drop(entry)

    def clear(self) -> int:
        """Withdraw everything; how many entries that were."""
        entries = [entry for entry in self._entries if entry.state != "dying"]
        for entry in entries:
            self.withdraw(entry)
        return len(entries)

    def counters(self) -> Mapping[str, int]:
        """What is kept now, and what is in use: leases and entries being filled or dying are zero when idle."""
        states = [entry.state for entry in self._entries]
        return {
            "entries": len(states),
            "bytes": self._bytes,
            "leases": sum(entry.leases for entry in self._entries),
            "filling": states.count("filling"),
            "dying": states.count("dying"),
        }

    def _value(self, entry: Entry) -> None:
        """Tokens saved a byte and use, on top of what the last evicted entry was worth: so age counts too."""
        entry.worth = self._floor + (1 + entry.uses) * entry.cache.length / entry.bytes

    def _drop(self, entry: Entry) -> None:
        """Nothing is left of `entry`."""
        entry.state = "absent"
        del self._entries[entry]
        self._bytes -= entry.bytes


def _may_go(entry: Entry) -> bool:
    """Whether `entry` may be evicted."""
    return entry.state == "ready" and not entry.leases

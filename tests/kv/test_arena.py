"""The store: what must stay, what goes first, and that its books are right whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsuf.errors import CheckpointError
from dsuf.kv.arena import Arena
from dsuf.kv.commit import is_due
from dsuf.kv.entry import Entry, checksum, size_bytes, verify
from tests.kv.rig import make_cache, make_prompt_trace, put

ONE = size_bytes(make_cache(range(10)))


def lengths(arena: Arena) -> list[int]:
    """Lengths of what is found among prompts of the tests below."""
    traces = [make_prompt_trace([n] * 20) for n in range(10)]
    return [n for n, trace in enumerate(traces) if arena.index.find(trace) is not None]


def test_the_oldest_of_equal_entries_goes_first_and_uses_keep() -> None:
    arena = Arena(3 * ONE)
    entries = [put(arena, [n] * 10) for n in range(3)]
    assert entries[0] is not None
    arena.credit(entries[0])
    put(arena, [3] * 10)
    assert lengths(arena) == [0, 2, 3]
    for n in range(4, 7):
        put(arena, [n] * 10)
    assert lengths(arena) == [4, 5, 6], "what was used once does not stay for ever"
    assert arena.evicted == 4
    assert arena.counters()["bytes"] == 3 * ONE


def test_what_saves_little_a_byte_goes_first() -> None:
    arena = Arena(4 * ONE)
    put(arena, [0] * 10)
    put(arena, [1] * 10, rows=100 + ONE)
    put(arena, [2] * 10)
    put(arena, [3] * 10)
    assert lengths(arena) == [0, 2, 3]


def test_nothing_goes_for_what_cannot_fit() -> None:
    arena = Arena(2 * ONE)
    first, second = put(arena, [0] * 10), put(arena, [1] * 10)
    assert first is not None
    assert second is not None
    assert put(arena, [2] * 10, rows=3 * ONE) is None
    arena.lease(first)
    arena.lease(second)
    assert put(arena, [2] * 10) is None
    assert lengths(arena) == [0, 1]
    arena.release(first)
    assert put(arena, [2] * 10) is not None
    assert lengths(arena) == [1, 2]


def test_a_leased_entry_dies_with_its_last_lease() -> None:
    arena = Arena(2 * ONE)
    entry = put(arena, [0] * 10)
    assert entry is not None
    arena.lease(entry)
    arena.lease(entry)
    arena.withdraw(entry)
    arena.withdraw(entry)
    assert (entry.state, lengths(arena), arena.counters()["dying"]) == ("dying", [], 1)
    arena.release(entry)
    assert entry.state == "dying"
    arena.release(entry)
    assert entry.state == "absent"
    assert set(arena.counters().values()) == {0}


def test_what_is_dropped_while_it_is_written_is_not_published() -> None:
    arena = Arena(2 * ONE)
    cache = make_cache([0] * 10)
    entry = arena.reserve(make_prompt_trace([0] * 10), cache)
    assert entry is not None
    assert lengths(arena) == [], "written, not yet found"
    assert arena.clear() == 1
    arena.publish(entry, checksum(cache))
    assert lengths(arena) == []
    assert set(arena.counters().values()) == {0}


def test_every_bit_counts() -> None:
    arena = Arena(1 << 20)
    entry = put(arena, range(10))
    assert entry is not None
    verify(entry)
    whole = entry.cache
    ids, rows = bytearray(whole.ids), bytearray(whole.parts["rows"])
    ids[17] ^= 4
    rows[99] ^= 128
    changes = [{"ids": bytes(ids)}, {"parts": {"rows": bytes(rows)}}, {"length": 9}, {"spare": 1}, {"repeats": True},
               {"fingerprint": "x"}, {"parts": {"row": whole.parts["rows"]}}, {"parts": {}}]  # fmt: skip
    for change in changes:
        values = {name: getattr(whole, name) for name in whole.__struct_fields__} | change
        entry.cache = type(whole)(**values)
        with pytest.raises(CheckpointError, match="fails its checksum"):
            verify(entry)


def test_commits_on_the_way_grow_and_come_before_the_end() -> None:
    made: list[int] = []
    for done in [*range(256, 6000, 256), 6000]:
        if is_due(done, prompt=6000, kept=made[-1] if made else 0, chunk_tokens=256):
            made.append(done)
    assert made == [256, 512, 768, 1280, 2048, 3072, 4608, 5888, 6000]
    assert not is_due(5888, prompt=6000, kept=5888, chunk_tokens=256)
    assert not is_due(4608, prompt=6000, kept=4352, chunk_tokens=256)


class Books(RuleBasedStateMachine):
    """Any order of operations, beside a plain account of what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(6 * ONE)
        self.filling: list[Entry] = []
        self.ready: list[Entry] = []
        self.leased: list[Entry] = []
        self.count = 0

    @rule(rows=st.integers(0, 3 * ONE), publish=st.booleans())
    def add(self, rows: int, publish: bool) -> None:
        """Keep one more; who had to go was ready and free."""
        self.count += 1
        cache = make_cache([self.count] * 10, rows=rows)
        free = [e for e in self.ready if e not in self.leased]
        room = 6 * ONE - self.arena.counters()["bytes"] + sum(e.bytes for e in free)
        entry = self.arena.reserve(make_prompt_trace([self.count] * 10), cache)
        assert (entry is not None) == (size_bytes(cache) <= room)
        gone = [e for e in self.ready if e.state == "absent"]
        assert all(e in free for e in gone)
        assert entry is not None or not gone
        self.ready = [e for e in self.ready if e not in gone]
        if entry is not None:
            self.filling.append(entry)
            if publish:
                self.publish()

    @precondition(lambda self: self.filling)
    @rule()
    def publish(self) -> None:
        """Finish the oldest that is being written."""
        entry = self.filling.pop(0)
        self.arena.publish(entry, checksum(entry.cache))
        if entry.state == "ready":
            self.ready.append(entry)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        """Use one."""
        entry = data.draw(st.sampled_from(self.ready))
        self.arena.lease(entry)
        self.leased.append(entry)

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), useful=st.booleans())
    def release(self, data: st.DataObject, useful: bool) -> None:
        """Return a use."""
        entry = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        assert entry.state != "absent", "what is leased stays"
        self.arena.release(entry)
        if useful and entry.state == "ready":
            self.arena.credit(entry)

    @precondition(lambda self: self.ready or self.filling)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A use failed, or what was written is not wanted any more."""
        entry = data.draw(st.sampled_from(self.ready + self.filling))
        self.arena.withdraw(entry)
        self.ready = [e for e in self.ready if e is not entry]

    @rule()
    def clear(self) -> None:
        """Drop everything."""
        self.arena.clear()
        self.ready = []

    @invariant()
    def nothing_is_lost_and_bytes_are_right(self) -> None:
        """What should be there is found, and counted."""
        for entry in self.ready:
            match = self.arena.index.find(make_prompt_trace([int.from_bytes(entry.cache.ids[:8], "little")] * 20))
            assert match is not None
            assert match.entry is entry
        waiting = [e for e in self.filling if e.state == "filling"]
        dying = {e for e in self.leased if e.state == "dying"}
        counters = self.arena.counters()
        assert counters["bytes"] == sum(e.bytes for e in (*self.ready, *waiting, *dying)) <= 6 * ONE
        assert counters["entries"] == len(self.ready) + len(waiting) + len(dying)
        assert counters["leases"] == len(self.leased)
        assert (counters["filling"], counters["dying"]) == (len(waiting), len(dying))

    def teardown(self) -> None:
        """All leases returned, everything dropped: nothing is left."""
        for entry in self.leased:
            self.arena.release(entry)
        self.arena.clear()
        assert set(self.arena.counters().values()) == {0}


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""The host store: pages kept once, what must stay, what goes first, and books that are right whatever happens."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.claims import Filling, Lease
from dsuf.kv.point import CommitPoint, HostPage
from dsuf.kv.trace import Trace
from tests.kv.rig import check_arena, fill, make_prompt_trace, make_small_arena, publish, put

PROMPTS = [[n] * 40 for n in range(10)]


def lengths(arena: Arena, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[int]:
    """Of each prompt, what is found of it; without those of which nothing is."""
    found = []
    for prompt in prompts:
        trace = make_prompt_trace(prompt)
        match = arena.find(arena.tree.walk(trace), trace)
        found.append(match.length if match is not None else 0)
    return found


def kept(arena: Arena) -> list[int]:
    """Which of the prompts are found."""
    return [n for n, length in enumerate(lengths(arena)) if length]


def test_blocks_change_their_generation_whenever_they_change_hands() -> None:
    blocks = Blocks(10, map_memory(35))
    assert blocks.count == 3
    taken = blocks.take(2)
    assert [len(blocks.view(block)) for block in taken] == [10, 10]
    assert [len(piece) for piece in blocks.pieces(taken, 13)] == [10, 3]
    before = list(blocks.generations)
    blocks.give(taken)
    assert all(blocks.generations[block] == before[block] + 1 for block in taken)
    assert blocks.take(3) is not None
    assert all(blocks.generations[block] == before[block] + 2 for block in taken)
    blocks.give([0])
    with pytest.raises(AssertionError):
        blocks.give([0])


def test_whole_pages_are_kept_once() -> None:
    arena = make_small_arena(50)
    one = put(arena, range(20))  # two pages, a begun one, a state
    assert arena.counters()["bytes"] == 400
    two = put(arena, range(27))  # one page more
    three = put(arena, [*range(16), 7, 7, 7])  # none
    assert one is not None
    assert two is not None
    assert three is not None
    assert arena.counters()["bytes"] == 400 + 300 + 200
    assert [point.own(0) for point in (one, two, three)] == [(20, 2), (27 - 20, 3), (19, 2)]
    assert [point.own(8) for point in (one, two, three)] == [(20 - 8, 2), (7, 3), (19 - 8, 2)]
    arena.withdraw(two)
    assert arena.counters()["bytes"] == 600
    arena.withdraw(one)
    assert three.own(0) == three.own(8) == (19, 4)
    arena.withdraw(three)
    assert set(arena.counters().values()) == {0}
    assert list(arena.tree.nodes()) == []


def test_the_oldest_of_equal_entries_goes_first_and_uses_keep() -> None:
    arena = make_small_arena(9)  # of 3 blocks each: a page, a begun page, a state
    points = [put(arena, [n] * 10) for n in range(3)]
    assert points[0] is not None
    arena.credit(points[0])
    put(arena, [3] * 10)
    assert kept(arena) == [0, 2, 3]
    for n in range(4, 7):
        put(arena, [n] * 10)
    assert kept(arena) == [4, 5, 6], "what was used once does not stay for ever"
    assert arena.evicted == 4
    assert arena.blocks.free == 0


def test_what_saves_little_a_block_goes_first() -> None:
    arena = make_small_arena(12)
    put(arena, [0] * 10)
    put(arena, [1] * 10, payload=301)  # 6 blocks
    put(arena, [2] * 10)
    put(arena, [3] * 10)
    assert kept(arena) == [0, 2, 3]


def test_only_what_would_not_be_there_without_it_counts() -> None:
    """Of two commit points near the end of a long session the last one goes first, and not for ever the others'."""
    arena = make_small_arena(12)
    first = put(arena, [1] * 40)  # five pages and a state
    second = put(arena, [1] * 48)  # a page and a state more: 8 tokens for two blocks
    third = put(arena, [3] * 24)  # three pages and a state: 24 tokens for four blocks
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.own(0), second.own(0), third.own(0)) == ((40, 1), (8, 2), (24, 4))
    assert arena.reserve(make_prompt_trace([4] * 8), 8, 30) is not None
    assert [point.state for point in (first, second, third)] == ["ready", "absent", "ready"]
    assert first.own(0) == (40, 6)
    assert arena.reserve(make_prompt_trace([5] * 16), 16, 130) is not None
    assert [point.state for point in (first, third)] == ["ready", "absent"], "40 tokens for six blocks"


def test_where_windows_are_replayed_a_state_within_a_session_saves_little() -> None:
    arena = make_small_arena(20)
    arena.replay_tokens = 8
    points = [put(arena, [1] * length) for length in (40, 80)]
    other = put(arena, [2] * 8)  # a page and a state: 8 tokens for two blocks
    inner, end = points
    assert inner is not None
    assert end is not None
    assert other is not None
    assert inner.own(8) == (8, 1), "the rest could be had from the other's pages"
    assert end.own(8) == (40, 6)
    arena.credit(other)
    assert arena.reserve(make_prompt_trace([3] * 40), 40, 130) is not None
    assert [point.state for point in (inner, end, other)] == ["ready", "absent", "ready"]


def test_a_long_session_that_nobody_goes_on_from_gives_way_in_time() -> None:
    arena = make_small_arena(60)
    for length in (300, 320):
        put(arena, [99] * length)  # forty pages, two states
    left = []
    for n in range(150):
        put(arena, [n % 90] * (8 + n % 9))
        left.append(lengths(arena, [[99] * 400])[0])
    assert left[5] > 0
    assert left[-1] == 0
    assert sum(map(bool, lengths(arena, [[n] * 40 for n in range(90)]))) > 10
    check_arena(arena)


def test_the_order_does_not_grow_with_uses() -> None:
    arena = make_small_arena(9)
    points = [put(arena, [n] * 10) for n in range(3)]
    for _ in range(1000):
        for point in points:
            assert point is not None
            arena.credit(point)
    assert len(arena._ranking._heap) < 100
    put(arena, [3] * 10)
    assert kept(arena) == [1, 2, 3]


def test_nothing_goes_for_what_cannot_fit() -> None:
    arena = make_small_arena(6)
    first, second = put(arena, [0] * 10), put(arena, [1] * 10)
    assert first is not None
    assert second is not None
    assert put(arena, [2] * 10, payload=401) is None
    leases = [arena.lease(point.page, point) for point in (first, second)]
    assert put(arena, [2] * 10) is None
    assert kept(arena) == [0, 1]
    arena.release(leases[0])
    assert put(arena, [2] * 10) is not None
    assert kept(arena) == [1, 2]
    assert arena.evicted == 1


def test_what_is_about_to_be_built_upon_stays() -> None:
    arena = make_small_arena(6)
    put(arena, [0] * 16)  # two pages, a state
    filling = fill(arena, make_prompt_trace([0] * 24))  # one page more, a state
    assert filling is not None
    assert len(filling.blocks) == 2
    assert put(arena, [1] * 16) is None, "the pages of the first stay while something is written behind them"
    assert put(arena, [1] * 8) is not None
    assert lengths(arena)[:2] == [0, 8], "its state may go"
    assert publish(arena, filling) is not None
    assert lengths(arena)[:2] == [24, 8]
    check_arena(arena)


def test_a_leased_entry_dies_with_its_last_lease() -> None:
    arena = make_small_arena(6)
    point = put(arena, [0] * 10)
    assert point is not None
    leases = [arena.lease(point.page, point) for _ in range(2)]
    arena.withdraw(point)
    arena.withdraw(point)
    assert (point.state, kept(arena), arena.counters()["dying"]) == ("dying", [], 1)
    arena.release(leases[0])
    arena.release(leases[0])
    assert point.state == "dying"
    again = put(arena, [0] * 10)
    assert again is not None
    assert kept(arena) == [0], "made anew beside the one that dies"
    arena.release(leases[1])
    assert point.state == "absent"
    check_arena(arena)
    arena.withdraw(again)
    assert set(arena.counters().values()) == {0}


def test_what_is_dropped_while_it_is_written_is_not_published() -> None:
    arena = make_small_arena(9)
    filling = fill(arena, make_prompt_trace([0] * 10))
    put(arena, [1] * 10)
    assert filling is not None
    assert kept(arena) == [1], "written, not yet found"
    assert arena.clear() == 1
    assert publish(arena, filling) is None
    assert kept(arena) == []
    assert set(arena.counters().values()) == {0}


def test_what_it_was_to_stand_on_is_gone_so_it_is_not_published() -> None:
    arena = make_small_arena(20)
    base = put(arena, [0] * 8)
    filling = fill(arena, make_prompt_trace([0] * 16))
    assert base is not None
    assert base.page is not None
    assert filling is not None
    arena.withdraw_page(base.page)
    other = put(arena, [0] * 8)
    assert other is not None
    assert publish(arena, filling) is None
    assert lengths(arena)[0] == 8
    check_arena(arena)


def test_what_follows_a_cache_that_is_gone_is_not_found() -> None:
    arena = make_small_arena(20)
    first = fill(arena, make_prompt_trace([0] * 16))
    assert first is not None
    second = arena.reserve(make_prompt_trace([0] * 24), 24, 30, first)
    assert second is not None
    point = publish(arena, first)
    assert point is not None
    arena.withdraw(point)
    assert publish(arena, second) is None
    check_arena(arena)
    assert arena.blocks.free == 20


def test_a_damaged_page_takes_with_it_what_stands_on_it() -> None:
    arena = make_small_arena(40)
    points = [put(arena, [*([0] * 16), *more]) for more in ([], [1] * 8, [2] * 8, [2] * 16)]
    last = points[-1]
    assert last is not None
    assert last.page is not None
    lease = arena.lease(last.page)
    page = list(last.page.chain())[1]
    arena.withdraw_page(page)
    assert lengths(arena, [[*([0] * 16), *([n] * 20)] for n in range(3)]) == [16, 24, 16]
    check_arena(arena)
    arena.release(lease)
    check_arena(arena)
    assert arena.counters()["entries"] == 2


def test_pages_alone_are_kept_without_a_state() -> None:
    arena = make_small_arena(20)
    filling = fill(arena, make_prompt_trace([0] * 16), payload=0)
    assert filling is not None
    run = publish(arena, filling, payload=0)
    assert run is not None
    assert arena.counters()["bytes"] == 200


class Mirror:
    """What a listener of an arena knows to be there, as it is told."""

    def __init__(self) -> None:
        self.pages: set[HostPage] = set()
        self.points: set[CommitPoint] = set()

    def keep_page(self, page: HostPage) -> None:
        assert page not in self.pages
        assert page.parent is None or page.parent in self.pages
        self.pages.add(page)

    def drop_page(self, page: HostPage) -> None:
        assert not any(follower in self.pages for follower in page.followers)
        self.pages.remove(page)

    def keep_point(self, point: CommitPoint) -> None:
        assert point not in self.points
        assert point.page is None or point.page in self.pages
        self.points.add(point)

    def drop_point(self, point: CommitPoint) -> None:
        self.points.remove(point)

    def expect(self, prompt: Trace) -> None:
        raise AssertionError("nobody said so")

    expect_no_more = expect


class Store(RuleBasedStateMachine):
    """An arena under random use; the bytes of what is leased never change."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = make_small_arena(14)
        self.fillings: list[Filling] = []
        self.leases: list[tuple[Lease, list[tuple[int, bytes]]]] = []
        self.written = 0
        self.mirror = Mirror()
        self.arena.listeners.append(self.mirror)

    def points(self) -> list[CommitPoint]:
        return [point for point in self.arena._points if point.state == "ready"]

    def pages(self) -> list[HostPage]:
        return [node.host for node in self.arena.tree.nodes() if node.host is not None]

    @rule(prompt=st.lists(st.sampled_from([1, 2]), max_size=4), more=st.integers(0, 7), payload=st.integers(1, 350))
    def reserve(self, prompt: list[int], more: int, payload: int) -> None:
        tokens = [token for token in prompt for _ in range(8)] + [3] * more
        filling = self.arena.reserve(make_prompt_trace(tokens), len(tokens), payload)
        if filling is not None:
            self.fillings.append(filling)
            for block in filling.blocks:
                self.written += 1
                self.arena.blocks.view(block)[:] = self.written.to_bytes(4, "little") * 25

    @precondition(lambda self: any(filling.tail is None for filling in self.fillings))
    @rule(data=st.data(), prompt=st.lists(st.sampled_from([1, 2]), max_size=2), more=st.integers(0, 7))
    def follow(self, data: st.DataObject, prompt: list[int], more: int) -> None:
        """What follows may be published before what it follows, which then does not count."""
        after = data.draw(st.sampled_from([filling for filling in self.fillings if filling.tail is None]))
        before = np.frombuffer(after.trace.ids, "<i8").tolist()
        tokens = before + [token for token in prompt for _ in range(8)] + [3] * more
        filling = self.arena.reserve(make_prompt_trace(tokens), len(tokens), 30, after)
        if filling is not None:
            self.fillings.append(filling)

    @precondition(lambda self: self.fillings)
    @rule(data=st.data(), spare=st.integers(0, 9))
    def publish(self, data: st.DataObject, spare: int) -> None:
        filling = self.fillings.pop(data.draw(st.integers(0, len(self.fillings) - 1)))
        length = filling.trace.length
        publish(self.arena, filling, spare=min(spare, length), payload=100 * len(filling.payload))

    @precondition(lambda self: self.fillings)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        filling = self.fillings.pop(data.draw(st.integers(0, len(self.fillings) - 1)))
        self.arena.abandon(filling)
        self.arena.abandon(filling)

    @precondition(lambda self: self.points())
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        point = data.draw(st.sampled_from(self.points()))
        blocks = [*point.blocks, *([] if point.tail is None else [point.tail])]
        self.add_lease(self.arena.lease(point.page, point), blocks)
        self.arena.credit(point)

    @precondition(lambda self: self.pages())
    @rule(data=st.data())
    def lease_page(self, data: st.DataObject) -> None:
        self.add_lease(self.arena.lease(data.draw(st.sampled_from(self.pages()))), [])

    def add_lease(self, lease: Lease, blocks: list[int]) -> None:
        blocks += [page.block for page in (lease.page.chain() if lease.page is not None else ())]
        self.leases.append((lease, [(block, bytes(self.arena.blocks.view(block))) for block in blocks]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.arena.release(lease)
        self.arena.release(lease)

    @precondition(lambda self: self.points())
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.arena.withdraw(data.draw(st.sampled_from(self.points())))

    @precondition(lambda self: self.pages())
    @rule(data=st.data())
    def withdraw_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.pages()))
        self.arena.withdraw_page(page)
        assert not any(page in (point.page.chain() if point.page is not None else ()) for point in self.points())

    @precondition(lambda self: len(self.points()) > 3)
    @rule()
    def clear(self) -> None:
        self.arena.clear()
        assert self.pages() == []

    @invariant()
    def books_are_right(self) -> None:
        check_arena(self.arena)
        assert len(self.arena._leases) == len(self.leases)

    @invariant()
    def listeners_know_what_is_there(self) -> None:
        assert self.mirror.pages == set(self.pages())
        assert self.mirror.points == set(self.points())

    @invariant()
    def what_is_leased_is_as_it_was(self) -> None:
        for _, rows in self.leases:
            assert all(self.arena.blocks.view(block) == row for block, row in rows)

    def teardown(self) -> None:
        for lease, _ in self.leases:
            self.arena.release(lease)
        for filling in self.fillings:
            self.arena.abandon(filling)
        self.arena.clear()
        assert set(self.arena.counters().values()) == {0}
        assert self.arena.blocks.free == self.arena.blocks.count
        assert list(self.arena.tree.nodes()) == []


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

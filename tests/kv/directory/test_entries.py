"""What is told of an arena, and what is found by it: never more than the arena has, and hardly less."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.kv.arena import Arena
from dsuf.kv.directory.book import Book, Found
from dsuf.kv.directory.entry import STRIDE_PAGES, describe_point, is_entry, read_point
from dsuf.kv.directory.shelf import Shelf
from dsuf.types import Span
from tests.kv.rig import fill, make_prompt_trace, make_small_arena, publish, put

HOLDER = 7


def make_arena(blocks: int = 400) -> Arena:
    """An arena of an engine that replays."""
    arena = make_small_arena(blocks)
    arena.replay_tokens = 16
    return arena


def read_shelf(shelf: Shelf) -> Book:
    """A book that heard of all that is on a shelf."""
    book = Book()
    book.add(HOLDER, shelf.take_all())
    return book


def find(book: Book, prompt: Sequence[int], **trace: object) -> Found:
    """What the one holder has of a prompt."""
    return book.find(make_prompt_trace(prompt, **trace)).get(HOLDER, Found())  # type: ignore[arg-type]


def test_a_commit_point_is_found_by_the_prompts_that_can_use_it() -> None:
    arena = make_arena()
    book_of = Shelf(arena, 1000)
    put(arena, range(20))
    book = read_shelf(book_of)
    assert find(book, range(21)) == Found(20, 2)
    assert find(book, range(20)) == Found(0, 2), "one token is left to compute"
    assert find(book, [*range(19), 7, 7]) == Found(0, 2)
    assert find(book, [*range(15), 7, 7]) == Found()
    assert find(book, range(17)) == Found(0, 2)
    assert find(book, range(16)) == Found(0, 1)
    assert find(book, range(21), salt="other") == Found()


@pytest.mark.parametrize("way", ["spare", "near"])
def test_a_state_that_can_spare_some_positions_is_found_without_them(way: str) -> None:
    arena = make_arena()
    shelf = Shelf(arena, 1000)
    put(arena, range(20), **{way: 5})
    put(arena, range(100, 116), repeats=True)
    book = read_shelf(shelf)
    assert find(book, range(30)).length == 20
    assert find(book, range(20)).length == 19
    assert find(book, [*range(15), 7, 7]).length == 15
    assert find(book, [*range(18), 7, 7]).length == 15, "18 could be used, 15 is sure"
    assert find(book, [*range(14), 7, 7]).length == 0
    assert find(book, range(100, 116)).length == 15
    assert find(book, range(100, 117)).length == 16
    assert find(book, [*range(100, 115), 7]).length == 0


def test_pictures_count() -> None:
    span, other = Span(start=17, stop=19, digest=b"a"), Span(start=17, stop=19, digest=b"b")
    arena = make_arena()
    shelf = Shelf(arena, 1000)
    put(arena, range(20), spans=(span,))
    book = read_shelf(shelf)
    assert find(book, range(30), spans=(span,)).length == 20
    assert find(book, range(30), spans=(other,)).length == 0
    assert find(book, range(30)).length == 0
    early = Span(start=2, stop=4, digest=b"a")
    assert find(book, range(30), spans=(early, span)) == Found()


def test_each_eighth_page_and_the_last_ones_are_told() -> None:
    arena = make_arena()
    shelf = Shelf(arena, 1000)
    long = [1] * 8 * 20
    trunk = put(arena, long, payload=10)
    assert len(shelf) == 1 + 3, "a state, pages 8, 16 and 20"
    branch = put(arena, [*long[: 8 * 10], *([2] * 8)])
    assert len(shelf) == 2 + 4
    assert trunk is not None
    assert branch is not None
    arena.withdraw(trunk)
    assert len(shelf) == 1 + 2, "the branch: pages 8 and 11"
    arena.withdraw(branch)
    assert len(shelf) == shelf.unsent == 0


def test_where_the_engine_does_not_replay_pages_are_not_told() -> None:
    arena = make_small_arena(100)
    shelf = Shelf(arena, 1000)
    point = put(arena, range(80))
    assert point is not None
    assert shelf.take_all() == [describe_point(point)]
    arena.withdraw(point)
    assert shelf.take(10) == ((), (describe_point(point),))


def test_only_what_is_kept_is_told() -> None:
    arena = make_arena(10)
    shelf = Shelf(arena, 1000)
    filling = fill(arena, make_prompt_trace(range(20)))
    assert filling is not None
    assert len(shelf) == 0, "not while it is written"
    arena.abandon(filling)
    assert len(shelf) == shelf.unsent == 0, "nor when that came to nothing"
    filling = fill(arena, make_prompt_trace(range(20)))
    assert filling is not None
    arena.clear()
    assert publish(arena, filling) is None
    assert len(shelf) == 0
    put(arena, range(20))
    assert len(shelf) == 2
    put(arena, range(100, 150))
    assert arena.evicted == 1
    assert find(read_shelf(shelf), range(30)) == Found()


def test_a_turn_is_told_as_long_as_it_is_here() -> None:
    """It may come twice; the next prompt may differ in its last tokens, as where it opens the reply, but not before."""
    arena, prompt = make_small_arena(100), range(40)
    shelf = Shelf(arena, 1000)
    for _ in range(2):
        arena.expect(make_prompt_trace(prompt))
    assert len(shelf) == 1
    for length in (40, 50, 33, 32):
        expected = Found(coming=True) if length > 32 else Found()
        assert find(read_shelf(shelf), [*prompt[:length], *range(90, 95)]) == Found(coming=True)
        assert find(read_shelf(shelf), prompt[:length]) == expected
    assert find(read_shelf(shelf), [*prompt[:31], *range(90, 110)]) == Found()
    assert find(read_shelf(shelf), range(60), salt="other") == Found()
    put(arena, prompt)
    assert find(read_shelf(shelf), range(60)) == Found(40, coming=True)
    arena.expect_no_more(make_prompt_trace(prompt))
    assert find(read_shelf(shelf), range(60)).coming
    arena.expect_no_more(make_prompt_trace(prompt))
    assert find(read_shelf(shelf), range(60)) == Found(40)


def test_a_turn_of_less_than_a_page_is_not_told_nor_one_that_was_here_before() -> None:
    arena = make_small_arena(100)
    early, short = make_prompt_trace(range(40)), make_prompt_trace(range(15))
    arena.expect(early)
    shelf = Shelf(arena, 1000)
    arena.expect(short)
    assert len(shelf) == 0
    for trace in (early, short):
        arena.expect_no_more(trace)
    assert len(shelf) == shelf.unsent == 0


def test_changes_are_taken_once_in_order_and_opposite_ones_come_to_nothing() -> None:
    arena = make_small_arena(100)
    shelf = Shelf(arena, 1000)
    points = [put(arena, [n] * 8) for n in range(4)]
    entries = [describe_point(point) for point in points if point is not None]
    assert points[1] is not None
    arena.withdraw(points[1])
    assert shelf.changed.is_set()
    assert shelf.take(2) == ((entries[0], entries[2]), ())
    assert points[0] is not None
    arena.withdraw(points[0])
    assert shelf.take(9) == ((entries[3],), (entries[0],))
    assert not shelf.changed.is_set()
    put(arena, [0] * 8)
    assert shelf.take(9) == ((entries[0],), ())


def test_too_many_changes_become_one() -> None:
    arena = make_small_arena(100)
    shelf = Shelf(arena, 3)
    for n in range(5):
        put(arena, [n] * 8)
    assert shelf.overflowed
    assert shelf.changed.is_set()
    assert len(shelf.take_all()) == 5
    assert not shelf.overflowed
    assert not shelf.changed.is_set()


def test_a_shelf_knows_what_was_there_before_it_and_hears_nothing_when_closed() -> None:
    arena = make_arena()
    early = Shelf(arena, 1000)
    put(arena, [1] * 100)
    put(arena, [*([1] * 50), *([2] * 20)], spare=3)
    late = Shelf(arena, 1000)
    assert sorted(early.take_all()) == sorted(late.take_all())
    late.close()
    late.close()
    put(arena, [3] * 20)
    assert len(early) == len(late) + 2


PROMPT = st.lists(st.sampled_from([1, 2]), max_size=20).map(lambda pages: [token for token in pages for _ in range(8)])


@settings(max_examples=150, deadline=None)
@given(
    kept=st.lists(st.tuples(PROMPT, st.integers(0, 7), st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
    gone=st.sets(st.integers(0, 5)),
    asked=st.lists(st.tuples(PROMPT, st.integers(1, 12)), min_size=1, max_size=6),
)
def test_what_is_found_is_there(
    kept: list[tuple[list[int], int, int, bool]], gone: set[int], asked: list[tuple[list[int], int]]
) -> None:
    """Never more than the arena itself would find; less by what a state can spare, and by part of a stride."""
    arena = make_arena()
    shelf, book, spares = Shelf(arena, 1000), Book(), [0]
    points = []
    for prompt, more, spare, repeats in kept:
        tokens = [*prompt, *([3] * more)] or [1]
        points.append(put(arena, tokens, spare=min(spare, len(tokens)), repeats=repeats))
        spares.append(spare)
        hear(book, shelf)
    for number in gone & set(range(len(points))):
        if (point := points[number]) is not None:
            arena.withdraw(point)
    hear(book, shelf)
    assert book.held(HOLDER) == set(shelf.take_all())
    for prompt, more in asked + [(prompt, more + 5) for prompt, more, _, _ in kept]:
        trace = make_prompt_trace([*prompt, *([3] * more)])
        match = arena.find(arena.tree.walk(trace), trace)
        there, found = (match.length if match is not None else 0), book.find(trace).get(HOLDER, Found())
        assert there - max(*spares, 1) <= found.length <= there
        pages = min(arena.kept_pages(trace), (trace.length - 1) // 8)
        assert pages - STRIDE_PAGES < found.pages <= pages
    arena.clear()
    hear(book, shelf)
    assert (book.entries, book._holders, book._points, book._rests) == (0, {}, {}, {})


def hear(book: Book, shelf: Shelf) -> None:
    """Let a book hear the changes of a shelf, in small parts."""
    while shelf.unsent:
        added, removed = shelf.take(3)
        book.remove(HOLDER, removed)
        book.add(HOLDER, added)


def test_holders_are_told_apart() -> None:
    arena = make_arena()
    shelf = Shelf(arena, 1000)
    put(arena, range(20))
    first, book = shelf.take_all(), Book()
    put(arena, range(40))
    both = shelf.take_all()
    for holder, entries in ((1, first), (2, both), (3, both)):
        book.add(holder, entries)
        book.add(holder, entries)
    trace = make_prompt_trace(range(50))
    assert book.find(trace) == {1: Found(20, 2), 2: Found(40, 5), 3: Found(40, 5)}
    book.drop(2)
    book.drop(2)
    book.remove(3, [*both, *both])
    assert book.find(trace) == {1: Found(20, 2)}
    assert book.entries == len(first)


def test_an_entry_can_be_read_again() -> None:
    arena = make_arena()
    point = put(arena, range(21), spare=3, repeats=True)
    assert point is not None
    entry = describe_point(point)
    assert is_entry(entry)
    read = read_point(entry)
    assert read is not None
    assert read.encode() == entry
    assert (read.length, read.spare, read.repeats, read.anchor) == (21, 3, True, point.anchor.digest)
    assert not any(map(is_entry, (b"", entry[1:], b"#")))


@pytest.mark.parametrize("count", [2000])
def test_many_states_on_one_beginning_cost_little(count: int) -> None:
    """They differ in their tokens, so one digest a length tells which it could be."""
    arena = make_small_arena(2 * count + 10)
    shelf = Shelf(arena, 10_000)
    for n in range(count):
        put(arena, [*range(8), n, n])
    book = read_shelf(shelf)
    anchor = make_prompt_trace(range(8)).chain[1]
    assert book._rests[anchor] == ((2, count),)
    assert find(book, [*range(8), 55, 55, 1]).length == 10

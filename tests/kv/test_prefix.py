"""What is found: the longest usable prefix, by hash and then by contents, and from where each part of it comes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.kv import trace
from dsuf.kv.arena import Arena
from dsuf.kv.attach import Place, choose, usable_tokens
from dsuf.kv.commit import is_due
from dsuf.kv.prefix import PrefixTree
from dsuf.kv.trace import common_tokens, follow_trace, trace_prompt
from dsuf.types import CacheLayout, Prompt, Span
from tests.kv.rig import LAYOUT, make_prompt_trace, make_small_arena, put

IDS = tuple(range(1000, 1300))
PICTURE = Span(start=11, stop=21, digest=b"a picture")


def found(arena: Arena, *args: object, **kwargs: object) -> int:
    """Positions of a commit point that a prompt can use."""
    prompt = make_prompt_trace(*args, **kwargs)  # type: ignore[arg-type]
    match = arena.find(arena.tree.walk(prompt), prompt)
    return match.length if match is not None else 0


@pytest.mark.parametrize(
    ("length", "spare", "repeats", "common", "prompt", "usable"),
    [
        (10, 0, False, 10, 11, 10),
        (10, 0, False, 10, 10, 0),
        (10, 0, True, 10, 10, 9),
        (10, 0, True, 9, 10, 0),
        (10, 0, True, 9, 9, 0),
        (10, 3, False, 10, 10, 9),
        (10, 3, False, 7, 20, 7),
        (10, 3, False, 6, 20, 0),
        (10, 3, False, 8, 8, 7),
        (10, 3, False, 7, 7, 0),
        (10, 10, True, 0, 5, 0),
        (1, 1, True, 1, 1, 0),
    ],
)
def test_usable_part(length: int, spare: int, repeats: bool, common: int, prompt: int, usable: int) -> None:
    assert usable_tokens(length, spare, repeats, common=common, prompt=prompt) == usable


def layout(replay_tokens: int) -> CacheLayout:
    return CacheLayout(
        fingerprint="x", page_tokens=8, page_bytes=8, pages=9, state_bytes=8, replay_tokens=replay_tokens
    )  # fmt: skip


@given(
    places=st.lists(st.sampled_from(["device", "host", "peer"]), max_size=6),
    points=st.lists(st.integers(0, 48), max_size=4),
    more=st.integers(1, 20),
    replay=st.sampled_from([0, 8, 12]),
)
def test_the_choice_computes_the_least_and_its_parts_add_up(
    places: list[str], points: list[int], more: int, replay: int
) -> None:
    points = [min(length, 8 * len(places) + 7) for length in points]
    prompt = max(points, default=0) + more
    choice = choose(
        [Place(bytes([n]), source) for n, source in enumerate(places)],  # type: ignore[arg-type]
        points, prompt=prompt, layout=layout(replay),
    )  # fmt: skip
    by_pages = min(len(places), (prompt - 1) // 8) * 8 - replay if replay else 0
    assert choice.start == max([0, by_pages, *points])
    assert choice.start < prompt
    if choice.point is None:
        assert choice.length == (choice.start and choice.start + replay)
    else:
        assert points.index(choice.start) == choice.point
        assert choice.length == choice.start
    restored = choice.restored()
    assert restored.start == restored.device_tokens + restored.host_tokens + restored.peer_tokens
    at = 0
    for extent in choice.extents:
        assert extent.start == at
        assert extent.stop > extent.start
        at = extent.stop
    assert at == prompt
    whole = [source for e in choice.extents[:-1] for source in [e.source] * (e.stop // 8 - e.start // 8)]
    assert whole == places[: choice.length // 8]


def test_a_prompt_longer_than_what_is_kept_finds_the_longest() -> None:
    arena = put_all({5: 0, 8: 0, 13: 0, 16: 0, 25: 0})
    assert [found(arena, IDS[:n]) for n in (5, 6, 8, 9, 16, 17, 25, 26, 300)] == [0, 5, 5, 8, 13, 16, 16, 25, 25]


def put_all(spares: dict[int, int], way: str = "spare") -> Arena:
    """An arena with commit points at these lengths of `IDS`."""
    arena = make_small_arena(400)
    for length, spare in spares.items():
        put(arena, IDS[:length], **{way: spare})
    return arena


@pytest.mark.parametrize("way", ["spare", "near"])
def test_a_shared_beginning_is_used_as_far_as_commit_points_can_spare(way: str) -> None:
    arena = put_all(dict.fromkeys(range(7, 300, 7), 3), way)
    shared = [found(arena, (*IDS[:n], *range(50))) for n in range(290)]
    assert all(n - 7 < reused <= n for n, reused in enumerate(shared))
    assert shared == sorted(shared)


@pytest.mark.parametrize(
    ("salt", "fingerprint", "page_tokens", "change", "digest"),
    [
        ("other", "toy", 8, None, b"a picture"),
        ("", "other weights", 8, None, b"a picture"),
        ("", "toy", 4, None, b"a picture"),
        ("", "toy", 8, 0, b"a picture"),
        ("", "toy", 8, 7, b"a picture"),
        ("", "toy", 8, 8, b"a picture"),
        ("", "toy", 8, 24, b"a picture"),
        ("", "toy", 8, None, b"another"),
    ],
)
@pytest.mark.parametrize("collide", [False, True])
def test_pitfall_12_each_part_of_the_key_alone_makes_a_miss(
    monkeypatch: pytest.MonkeyPatch, salt: str, fingerprint: str, page_tokens: int, change: int | None, digest: bytes,
    collide: bool,
) -> None:  # fmt: skip
    """Also where all hashes are equal: contents are compared, those of all pages before too."""
    if collide:
        monkeypatch.setattr(trace, "digest", lambda previous, content: b"always the same")
    arena = make_small_arena(400)
    put(arena, IDS[:25], spans=(PICTURE,))
    assert found(arena, IDS[:40], spans=(PICTURE,)) == 25
    ids = [7 if i == change else token for i, token in enumerate(IDS[:40])]
    spans = (Span(start=PICTURE.start, stop=PICTURE.stop, digest=digest),)
    other = msgspec.structs.replace(LAYOUT, fingerprint=fingerprint, page_tokens=page_tokens)
    assert found(arena, ids, salt=salt, layout=other, spans=spans) == 0


@pytest.mark.parametrize(
    ("spans", "usable"),
    [
        ((PICTURE,), 25),
        ((), 11),
        ((Span(start=11, stop=22, digest=b"a picture"),), 11),
        ((Span(start=12, stop=21, digest=b"a picture"),), 11),
        ((PICTURE, Span(start=22, stop=23, digest=b"a second one")), 22),
        ((PICTURE, Span(start=24, stop=30, digest=b"a second one")), 24),
        ((PICTURE, Span(start=26, stop=30, digest=b"behind")), 25),
    ],
)
def test_a_picture_counts_as_a_whole_and_at_its_place(spans: tuple[Span, ...], usable: int) -> None:
    arena = make_small_arena(400)
    put(arena, IDS[:25], spans=(PICTURE,), spare=25)
    assert found(arena, IDS[:40], spans=spans) == usable


@pytest.mark.parametrize("collide", [False, True])
def test_the_tree_knows_pages_by_all_before_them(monkeypatch: pytest.MonkeyPatch, collide: bool) -> None:
    if collide:
        monkeypatch.setattr(trace, "digest", lambda previous, content: b"always the same")
    tree = PrefixTree()
    one, two = make_prompt_trace(IDS[:40]), make_prompt_trace((*IDS[:8], *range(8), *IDS[16:40]))
    nodes = tree.follow(tree.root(one), one, 5)
    tree.pin(nodes[-1])
    assert tree.walk(one)[1:] == nodes
    assert tree.walk(two)[1:] == nodes[:1], "its third page holds the same, behind another second one"
    assert tree.walk(make_prompt_trace(IDS[:39]))[1:] == nodes[:4]
    assert tree.walk(make_prompt_trace(IDS, salt="x")) == []
    others = tree.follow(tree.root(two), two, 5)
    assert others[0] is nodes[0]
    assert not set(others[1:]) & set(nodes)
    tree.prune(others[-1])
    assert tree.walk(two)[1:] == nodes[:1]
    tree.unpin(nodes[-1])
    assert list(tree.nodes()) == []


@given(
    first=st.lists(st.integers(0, 1), max_size=40), then=st.lists(st.integers(0, 1), max_size=40),
    cut=st.integers(0, 40),
)  # fmt: skip
def test_a_trace_that_goes_on_is_as_made_at_once(first: list[int], then: list[int], cut: int) -> None:
    spans = (Span(start=3, stop=12, digest=b"one"), Span(start=30, stop=34, digest=b"two"))
    whole = [*first[:cut], *then]
    begun = make_prompt_trace(first, spans=spans)
    made = make_prompt_trace(whole, spans=spans)
    assert follow_trace(begun, made.ids, spans) == made
    common = common_tokens(begun, made)
    assert all(first[i] == whole[i] for i in range(common))
    same = [a == b for a, b in zip(first, whole, strict=False)]
    starts = [span.start for span in set(begun.spans) ^ set(made.spans)]
    assert common == min([same.index(False) if False in same else len(same), *starts])


def test_a_long_prompt_is_converted_in_pieces() -> None:
    ids = tuple(range(40_000))
    made = trace_prompt(LAYOUT, Prompt(ids=ids, spans=(PICTURE,), salt="x"))
    assert made == make_prompt_trace(ids, spans=(PICTURE,), salt="x")
    assert made.length == 40_000


@pytest.mark.parametrize("length", [15, 16, 17])
def test_what_is_kept_already_is_found_by_its_length(length: int) -> None:
    arena = put_all(dict.fromkeys((15, 16, 17), 5))
    point = arena.find_exact(make_prompt_trace(IDS), length)
    assert point is not None
    assert point.head.length == length
    assert arena.find_exact(make_prompt_trace(IDS, salt="x"), length) is None
    assert arena.find_exact(make_prompt_trace((*IDS[: length - 1], 7)), length) is None
    assert arena.find_exact(make_prompt_trace(IDS), 14) is arena.find_exact(make_prompt_trace(IDS), 18) is None


@settings(max_examples=150, deadline=None)
@given(
    kept=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 12), st.booleans()), max_size=8),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    stretch=st.integers(1, 5),
)
def test_the_index_finds_what_a_search_through_everything_finds(
    kept: list[tuple[list[int], int, bool]], prompt: list[int], stretch: int
) -> None:
    arena = make_small_arena(400)
    best, wanted = 0, [token for token in prompt for _ in range(stretch)]
    for short, spare, repeats in kept:
        ids = [token for token in short for _ in range(stretch)]
        spare = min(spare, len(ids))
        put(arena, ids, spare=spare, repeats=repeats)
        common = next(
            (i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), min(len(ids), len(wanted))
        )
        best = max(best, usable_tokens(len(ids), spare, repeats, common=common, prompt=len(wanted)))
    assert found(arena, wanted) == best


def due(prompt: int, *, exact: bool, chunk: int = 10, kept: int = 0) -> list[int]:
    """Where a prefill by chunks commits."""
    points = []
    for done in [*range(kept + chunk, prompt, chunk), prompt]:
        if is_due(done, prompt=prompt, kept=kept, chunk_tokens=chunk, exact=exact):
            points.append(done)
            kept = done
    return points


def test_commit_points_of_a_prefill() -> None:
    assert due(35, exact=False) == [35]
    assert due(35, exact=True) == [10, 20, 30, 35]
    assert due(205, exact=True) == [10, 20, 30, 50, 80, 120, 180, 200, 205]
    assert due(205, exact=True, kept=100) == [150, 200, 205]
    assert due(205, exact=False, kept=100) == [205]
    assert not is_due(100, prompt=100, kept=100, chunk_tokens=10, exact=True)
    rows = sum(due(100_000, exact=True, chunk=1000))
    assert rows < 6 * 100_000

"""What is found: the longest usable prefix, by hash and then by contents."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.kv import trace
from dsuf.kv.arena import Arena
from dsuf.kv.attach import usable_tokens
from dsuf.types import Span
from tests.kv.rig import make_cache, make_prompt_trace, put

IDS = tuple(range(1000, 1300))
PICTURE = Span(start=70, stop=90, digest=b"a picture")


def found(arena: Arena, *args: object, **kwargs: object) -> int:
    """Usable positions for a prompt."""
    match = arena.index.find(make_prompt_trace(*args, **kwargs))  # type: ignore[arg-type]
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
        (0, 0, False, 0, 5, 0),
    ],
)
def test_usable_part(length: int, spare: int, repeats: bool, common: int, prompt: int, usable: int) -> None:
    assert usable_tokens(make_cache(range(length), spare=spare, repeats=repeats), common, prompt) == usable


def test_a_prompt_longer_than_what_is_kept_finds_the_longest() -> None:
    arena = Arena(1 << 20)
    for length in (5, 64, 100, 128, 200):
        put(arena, IDS[:length])
    assert [found(arena, IDS[:n]) for n in (5, 6, 64, 65, 128, 129, 200, 201, 300)] == [
        0, 5, 5, 64, 100, 128, 128, 200, 200,
    ]  # fmt: skip


def test_reused_tokens_rise_with_what_is_shared() -> None:
    """Pitfall 11: between commit points the nearest one before is used."""
    arena = Arena(1 << 20)
    for length in range(20, 300, 20):
        put(arena, IDS[:length], spare=3)
    shared = [found(arena, (*IDS[:n], *range(50))) for n in range(300)]
    assert all(n - 20 < reused <= n for n, reused in enumerate(shared))
    assert shared == sorted(shared)


@pytest.mark.parametrize(
    ("salt", "fingerprint", "change", "digest"),
    [
        ("other", "scripted", None, b"a picture"),
        ("", "other weights", None, b"a picture"),
        ("", "scripted", 0, b"a picture"),
        ("", "scripted", 63, b"a picture"),
        ("", "scripted", 64, b"a picture"),
        ("", "scripted", 99, b"a picture"),
        ("", "scripted", None, b"another"),
    ],
)
@pytest.mark.parametrize("collide", [False, True])
def test_each_part_of_the_key_alone_makes_a_miss(
    monkeypatch: pytest.MonkeyPatch, salt: str, fingerprint: str, change: int | None, digest: bytes, collide: bool
) -> None:
    """Pitfall 12; and all hashes equal: contents are compared."""
    if collide:
        monkeypatch.setattr(trace, "digest", lambda previous, content: b"always the same")
    arena = Arena(1 << 20)
    put(arena, IDS[:100], spans=(PICTURE,))
    assert found(arena, IDS[:120], spans=(PICTURE,)) == 100
    ids = [7 if i == change else token for i, token in enumerate(IDS[:120])]
    spans = (Span(start=70, stop=90, digest=digest),)
    assert found(arena, ids, salt=salt, fingerprint=fingerprint, spans=spans) == 0


@pytest.mark.parametrize(
    ("spans", "usable"),
    [
        ((PICTURE,), 100),
        ((), 70),
        ((Span(start=70, stop=91, digest=b"a picture"),), 70),
        ((Span(start=71, stop=91, digest=b"a picture"),), 70),
        ((PICTURE, Span(start=95, stop=99, digest=b"a second one")), 95),
        ((PICTURE, Span(start=101, stop=110, digest=b"behind")), 100),
    ],
)
def test_a_picture_counts_as_a_whole_and_at_its_place(spans: tuple[Span, ...], usable: int) -> None:
    arena = Arena(1 << 20)
    put(arena, IDS[:100], spans=(PICTURE,), spare=100)
    assert found(arena, IDS[:120], spans=spans) == usable


def test_what_is_kept_already_is_found_by_its_length() -> None:
    arena = Arena(1 << 20)
    for length in (63, 64, 65):
        put(arena, IDS[:length], spare=5)
    exact: Callable[[int], object] = lambda n: arena.index.find_exact(make_prompt_trace(IDS), n)  # noqa: E731
    assert [exact(n) is not None for n in (62, 63, 64, 65, 66, 300)] == [False, True, True, True, False, False]
    assert arena.index.find_exact(make_prompt_trace(IDS, salt="x"), 64) is None


@settings(max_examples=150, deadline=None)
@given(
    kept=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 4), st.booleans()), max_size=8),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
)
def test_the_index_finds_what_a_search_through_everything_finds(
    kept: list[tuple[list[int], int, bool]], prompt: list[int]
) -> None:
    stretch = 20  # so that some are several blocks long
    arena = Arena(1 << 20)
    best, wanted = 0, [token for token in prompt for _ in range(stretch)]
    for short, spare, repeats in kept:
        ids = [token for token in short for _ in range(stretch)]
        put(arena, ids, spare=min(spare, len(ids)), repeats=repeats)
        common = next(
            (i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), min(len(ids), len(wanted))
        )
        cache = make_cache(ids, spare=min(spare, len(ids)), repeats=repeats)
        best = max(best, usable_tokens(cache, common, len(wanted)))
    assert found(arena, wanted) == best

"""Who is put back: only the worse, only as many as needed, and nobody for nothing."""

from hypothesis import given
from hypothesis import strategies as st

from dsuf.sched.preemption import Running, choose_victims

running = st.lists(
    st.builds(
        Running,
        turn=st.uuids().map(str), priority=st.integers(-2, 2), attached_s=st.floats(0, 9), own_pages=st.integers(0, 9),
    ),
    max_size=7,
)  # fmt: skip


def test_the_worst_and_latest_goes_first() -> None:
    turns = [Running(turn=str(i), priority=i // 2, attached_s=i, own_pages=4) for i in range(6)]
    assert choose_victims(turns, priority=0, missing_places=1, missing_pages=0) == ("5",)
    assert choose_victims(turns, priority=0, missing_places=0, missing_pages=7) == ("5", "4")
    assert choose_victims(turns, priority=2, missing_places=1, missing_pages=0) == ()
    assert choose_victims(turns, priority=0, missing_places=0, missing_pages=0) == ()


def test_one_with_many_pages_spares_the_others() -> None:
    small = [Running(turn=f"s{i}", priority=2, attached_s=i, own_pages=1) for i in range(3)]
    large = Running(turn="large", priority=1, attached_s=0, own_pages=50)
    assert choose_victims([*small, large], priority=0, missing_places=1, missing_pages=20) == ("large",)


@given(running, st.integers(-2, 2), st.integers(0, 4), st.integers(-3, 30))
def test_it_frees_what_it_promises_or_nothing(
    turns: list[Running], priority: int, missing_places: int, missing_pages: int
) -> None:
    by_name = {turn.turn: turn for turn in turns}
    chosen = [
        by_name[name]
        for name in choose_victims(turns, priority=priority, missing_places=missing_places, missing_pages=missing_pages)
    ]
    assert all(turn.priority > priority for turn in chosen)
    worse = [turn for turn in turns if turn.priority > priority]

    def enough(group: list[Running]) -> bool:
        return len(group) >= missing_places and sum(turn.own_pages for turn in group) >= missing_pages

    if chosen:
        assert enough(chosen)
        assert not any(enough([other for other in chosen if other is not turn]) for turn in chosen), "one too many"
    elif not enough([]):
        assert not enough(worse), "there was a way"

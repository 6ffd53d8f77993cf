"""Who is put back: only the worse, only as many as needed, and nobody for nothing."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dsuf.sched.preemption import Running, choose_victims

running = st.lists(
    st.builds(
        Running,
        turn=st.uuids().map(str), tenant=st.sampled_from("ab"),
        priority=st.integers(-2, 2), attached_s=st.floats(0, 9), own_pages=st.integers(0, 9),
    ),
    max_size=7,
)  # fmt: skip


def test_the_worst_and_latest_goes_first() -> None:
    turns = [Running(turn=str(i), priority=i // 2, attached_s=i, own_pages=4) for i in range(6)]
    assert choose_victims(turns, priority=0, tenant="", missing_places=1, missing_pages=0) == ("5",)
    assert choose_victims(turns, priority=0, tenant="", missing_places=0, missing_pages=7) == ("5", "4")
    assert choose_victims(turns, priority=2, tenant="", missing_places=1, missing_pages=0) == ()
    assert choose_victims(turns, priority=0, tenant="", missing_places=0, missing_pages=0) == ()


def test_one_with_many_pages_spares_the_others() -> None:
    small = [Running(turn=f"s{i}", priority=2, attached_s=i, own_pages=1) for i in range(3)]
    large = Running(turn="large", priority=1, attached_s=0, own_pages=50)
    assert choose_victims([*small, large], priority=0, tenant="", missing_places=1, missing_pages=20) == ("large",)


def test_a_tenant_takes_a_place_from_one_that_has_more_until_they_are_alike() -> None:
    def hold(**places: int) -> list[Running]:
        turns = [(tenant, i) for tenant, count in places.items() for i in range(count)]
        return [Running(turn=f"{t}{i}", tenant=t, priority=0, attached_s=i, own_pages=1) for t, i in turns]

    def victims(turns: list[Running], tenant: str, priority: int = 0) -> tuple[str, ...]:
        return choose_victims(turns, priority=priority, tenant=tenant, missing_places=1, missing_pages=0)

    assert victims(hold(a=8), "b") == ("a7",)
    assert victims(hold(a=7, b=1), "b") == ("a6",)
    assert victims(hold(a=5, b=3), "b") == ("a4",)
    assert victims(hold(a=4, b=4), "b") == () == victims(hold(a=4, b=3), "b"), "alike, or as good as"
    assert victims(hold(a=7, b=1), "a") == (), "who was put back takes nobody's place"
    assert victims(hold(a=3, b=4), "c") == ("b3",)
    assert victims(hold(a=8), "a") == () == victims(hold(a=8), "b", priority=1)
    assert victims(hold(a=1), "b") == ()


def test_one_that_cannot_be_moved_stays_and_counts_as_a_place() -> None:
    turns = [Running(turn=str(i), priority=0, attached_s=i, own_pages=1, tenant="a", movable=i < 2) for i in range(4)]
    assert choose_victims(turns, priority=0, tenant="b", missing_places=1, missing_pages=0) == ("1",)
    assert choose_victims(turns[2:], priority=0, tenant="b", missing_places=1, missing_pages=0) == ()
    assert choose_victims(turns, priority=-1, tenant="b", missing_places=3, missing_pages=0) == ()


@given(running, st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 4), st.integers(-3, 30))
def test_it_frees_what_it_promises_or_nothing(
    turns: list[Running], priority: int, tenant: str, missing_places: int, missing_pages: int
) -> None:
    by_name = {turn.turn: turn for turn in turns}
    names = choose_victims(
        turns, priority=priority, tenant=tenant, missing_places=missing_places, missing_pages=missing_pages
    )
    chosen = [by_name[name] for name in names]
    assert len(set(names)) == len(names)

    def fair(victims: list[Running]) -> bool:
        places = Counter(turn.tenant for turn in turns if turn not in victims)
        equals = [turn for turn in victims if turn.priority <= priority]
        return all(t.priority == priority and t.tenant != tenant and places[t.tenant] > places[tenant] for t in equals)

    assert fair(chosen)

    def enough(group: list[Running]) -> bool:
        return len(group) >= missing_places and sum(turn.own_pages for turn in group) >= missing_pages

    worse = [turn for turn in turns if turn.priority > priority]
    if chosen:
        assert enough(chosen)
        fewer = [[other for other in chosen if other is not turn] for turn in chosen]
        assert not any(enough(group) and fair(group) for group in fewer), "one too many"
    elif not enough([]):
        assert not enough(worse), "there was a way"

"""The queue against a plain model of it, and the two decisions beside it."""

from hypothesis import given
from hypothesis import strategies as st

from dsuf.sched.queue import TurnQueue, may_queue, retry_after_s
from dsuf.types import Turn
from tests.sched.rig import make_turn


def take(queue: TurnQueue) -> Turn:
    """Take the turn that is next."""
    turn = queue.first()
    assert turn is not None
    queue.take(turn)
    return turn


def test_one_tenant_is_served_in_order() -> None:
    queue = TurnQueue()
    turns = [make_turn(str(i)) for i in range(5)]
    for turn in turns:
        queue.put(turn)
    queue.remove(turns[2])
    assert [take(queue).id for _ in range(4)] == ["0", "1", "3", "4"]
    assert len(queue) == 0 and queue.first() is None


def test_tenants_take_turns() -> None:
    queue = TurnQueue()
    for i in range(4):
        queue.put(make_turn(f"a{i}", tenant="a"))
    queue.put(make_turn("b0", tenant="b"))
    assert [take(queue).id for _ in range(5)] == ["a0", "b0", "a1", "a2", "a3"]


def test_the_tenant_with_fewest_places_goes_first_whoever_was_put_back() -> None:
    queue = TurnQueue()
    for name in ("a0", "a1", "b0", "c0"):
        queue.put(make_turn(name, tenant=name[0]))
    queue.put(make_turn("back", tenant="a"), first=True)
    places = {"a": 3, "b": 1, "c": 1}
    order = []
    while (turn := queue.first(places)) is not None:
        queue.take(turn)
        order.append(turn.id)
    assert order == ["b0", "c0", "back", "a0", "a1"]


def test_better_priorities_go_first_and_who_was_put_back_goes_before_its_own() -> None:
    queue = TurnQueue()
    for name, tenant, priority in (("a", "x", 0), ("b", "x", 5), ("c", "y", -3), ("d", "y", 0), ("e", "z", -3)):
        queue.put(make_turn(name, tenant=tenant, priority=priority))
    back = make_turn("back", tenant="y", priority=0)
    queue.put(back, first=True)
    assert queue.count() == {0: 3, 5: 1, -3: 2}
    assert queue.holds(back) and not queue.holds(make_turn("back", tenant="y"))
    assert [take(queue).id for _ in range(6)] == ["c", "e", "back", "a", "d", "b"]
    assert not queue.holds(back)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from("abc")),
            st.tuples(st.sampled_from(["take", "leave"]), st.integers(0, 9)),
        )
    )
)
def test_queue_keeps_its_length_and_starves_nobody(actions: list[tuple[str, object]]) -> None:
    queue, waiting, served_since = TurnQueue(), [], {}
    for number, (action, value) in enumerate(actions):
        if action == "put":
            turn = make_turn(str(number), tenant=str(value))
            if all(other.tenant != turn.tenant for other in waiting):
                served_since[turn.tenant] = 0
            queue.put(turn)
            waiting.append(turn)
        elif waiting and action == "leave":
            queue.remove(waiting.pop(int(str(value)) % len(waiting)))
        elif waiting:
            turn = take(queue)
            assert turn is next(other for other in waiting if other.tenant == turn.tenant)
            waiting.remove(turn)
            for tenant in {other.tenant for other in waiting} - {turn.tenant}:
                served_since[tenant] += 1
                assert served_since[tenant] <= 2, "a tenant waits for each other one at most once"
            served_since[turn.tenant] = 0
        assert len(queue) == len(waiting)


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("ab")), max_size=12))
def test_the_first_is_always_of_the_best_priority(turns: list[tuple[int, str]]) -> None:
    queue = TurnQueue()
    for number, (priority, tenant) in enumerate(turns):
        queue.put(make_turn(str(number), tenant=tenant, priority=priority))
    taken = [take(queue) for _ in turns]
    assert [turn.priority for turn in taken] == sorted(priority for priority, _ in turns)


def test_free_places_do_not_count_as_waiting() -> None:
    assert may_queue(0, 0, limit=0, max_turns=1)
    assert not may_queue(1, 0, limit=0, max_turns=1)
    assert not may_queue(0, 1, limit=0, max_turns=1)
    assert may_queue(4, 4, limit=5, max_turns=4)
    assert not may_queue(5, 4, limit=5, max_turns=4)


@given(st.integers(0, 100_000), st.integers(1, 4096), st.floats(0, 1e6))
def test_retry_after_is_what_clients_obey(waiting: int, max_turns: int, turn_s: float) -> None:
    assert 1 <= retry_after_s(waiting, max_turns=max_turns, turn_s=turn_s) <= 10


def test_retry_after_grows_with_what_waits() -> None:
    assert retry_after_s(0, max_turns=4, turn_s=2.0) == 1
    assert retry_after_s(9, max_turns=4, turn_s=4.0) == 5
    assert retry_after_s(9, max_turns=8, turn_s=4.0) == 3

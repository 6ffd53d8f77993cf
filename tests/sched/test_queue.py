"""The queue against a plain model of it, and the two decisions beside it."""

from hypothesis import given
from hypothesis import strategies as st

from dsuf.sched.queue import TurnQueue, may_queue, retry_after_s
from tests.sched.rig import make_turn


def test_one_tenant_is_served_in_order() -> None:
    queue = TurnQueue()
    turns = [make_turn(str(i)) for i in range(5)]
    for turn in turns:
        queue.put(turn)
    queue.remove(turns[2])
    assert [queue.take().id for _ in range(4)] == ["0", "1", "3", "4"]
    assert len(queue) == 0 and queue.first() is None


def test_tenants_take_turns() -> None:
    queue = TurnQueue()
    for i in range(4):
        queue.put(make_turn(f"a{i}", tenant="a"))
    queue.put(make_turn("b0", tenant="b"))
    assert [queue.take().id for _ in range(5)] == ["a0", "b0", "a1", "a2", "a3"]


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
            first, turn = queue.first(), queue.take()
            assert first is turn
            assert turn is next(other for other in waiting if other.tenant == turn.tenant)
            waiting.remove(turn)
            for tenant in {other.tenant for other in waiting} - {turn.tenant}:
                served_since[tenant] += 1
                assert served_since[tenant] <= 2, "a tenant waits for each other one at most once"
            served_since[turn.tenant] = 0
        assert len(queue) == len(waiting)


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

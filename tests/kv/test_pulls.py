"""Which peers are asked, in which order, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsuf.kv.directory.contract import Candidate, Member
from dsuf.kv.pulls import (
    LEAST_BUDGET_S,
    LEAST_ORDER_S,
    MOST_TRIES,
    Pull,
    Speed,
    bear_copying,
    budget_order,
    plan_pulls,
    rank_providers,
)
from dsuf.types import CacheLayout

LAYOUT = CacheLayout(fingerprint="f", page_tokens=128, page_bytes=1000, pages=100, state_bytes=500, replay_tokens=128)
EXACT = CacheLayout(fingerprint="f", page_tokens=128, page_bytes=1000, pages=100, state_bytes=500)


def member(name: str, **facts: object) -> Member:
    """A member of the fleet."""
    return Member(node=name, boot="1", **facts)  # type: ignore[arg-type]


def plan(
    *candidates: Candidate,
    here: int = 0,
    token_s: float = 0.01,
    layout: CacheLayout = LAYOUT,
    prompt: int = 10_000,
    patience: float = 1.0,
) -> list[Pull]:
    """The pulls from peers that are all of one speed."""
    speed = Speed(wait_s=0.01, bytes_s=1e6)
    found = plan_pulls(
        candidates, prompt=prompt, here=here, layout=layout, token_s=token_s, speed=lambda _: speed, patience=patience
    )  # fmt: skip
    return list(found)


def test_what_is_coming_may_be_all_but_the_last_token_and_is_asked_for_first() -> None:
    a = Candidate(member=member("a"), length=1000, coming=True)
    b = Candidate(member=member("b"), length=1400)
    first, second = plan(b, a, prompt=1500)
    assert (first.member.node, first.tokens, first.coming) == ("a", 1499, True)
    assert (second.member.node, second.tokens, second.coming) == ("b", 1400, False)
    assert 0.9 < first.bear_s(first.budget_s) / first.budget_s < 1, "some of the time is left for the bytes"
    assert not plan(Candidate(member=member("a"), coming=True), prompt=1500, here=1400), "less than a page"


def test_the_most_saved_time_comes_first() -> None:
    a, b = Candidate(member=member("a"), length=1000, whole_pages=7), Candidate(member=member("b"), length=2000)
    assert [(pull.member.node, pull.tokens) for pull in plan(a, b)] == [("b", 2000), ("a", 1000)]
    assert plan(a, b)[0].budget_s == pytest.approx(20.0)


def test_what_is_here_counts() -> None:
    a = Candidate(member=member("a"), length=1000)
    assert [pull.tokens for pull in plan(a, here=800)] == [200]
    assert plan(a, here=900) == []


def test_pages_alone_help_where_the_engine_replays() -> None:
    pages = Candidate(member=member("a"), whole_pages=10)
    assert [pull.tokens for pull in plan(pages)] == [9 * 128]
    assert plan(pages, layout=EXACT) == []


def test_a_pull_that_takes_longer_than_computing_is_not_tried() -> None:
    a = Candidate(member=member("a"), length=1280, whole_pages=10)
    cost_s = 0.01 + 10_500 / 1e6
    assert len(plan(a, token_s=1.01 * cost_s / 1280)) == 1
    assert plan(a, token_s=0.99 * cost_s / 1280) == []


def test_tries_are_bounded() -> None:
    many = [Candidate(member=member(str(i)), length=1000 + i) for i in range(10)]
    assert len(plan(*many)) == MOST_TRIES


def test_before_any_prompt_was_computed_a_guess_will_do() -> None:
    assert plan(Candidate(member=member("a"), length=1000), token_s=0.0)


@given(st.integers(0, 5000), st.integers(0, 40), st.integers(0, 3000), st.floats(1e-6, 1))
def test_a_pull_only_helps(length: int, pages: int, here: int, token_s: float) -> None:
    """Its budget is what computing takes, and it promises positions that are not here."""
    for pull in plan(Candidate(member=member("a"), length=length, whole_pages=pages), here=here, token_s=token_s):
        assert pull.budget_s <= max(LEAST_BUDGET_S, pull.tokens * token_s)
        assert 128 <= pull.tokens <= max(length, pages * 128) - here


def test_speed_follows_what_is_seen() -> None:
    speed = Speed(wait_s=0.01, bytes_s=1e6)
    for _ in range(40):
        speed = speed.learn(10_000_000, 1.01)
    assert speed.bytes_s == pytest.approx(1e7, rel=0.01)
    for _ in range(40):
        speed = speed.learn(100, 0.002)
    assert speed.wait_s == pytest.approx(0.002, rel=0.05)


def test_patience_waits_a_multiple_of_what_computing_takes() -> None:
    """And takes what comes as slowly as that."""
    slow = Candidate(member=member("a"), length=1000)
    assert not plan(slow, token_s=1e-5), "it is slower than computing"
    [pull] = plan(slow, token_s=1e-5, patience=4.0)
    assert pull.budget_s == pytest.approx(LEAST_BUDGET_S)
    [pull] = plan(slow, token_s=0.01, patience=4.0)
    assert pull.budget_s == pytest.approx(40.0)
    assert bear_copying(100, 0.01) == pytest.approx(1.0)
    assert bear_copying(100, 0.01, 4.0) == pytest.approx(4.0)


def test_a_peer_that_was_slow_once_gets_another_chance() -> None:
    """What was bad is forgotten by and by, what is good is not."""
    slow = Speed(wait_s=2.01, bytes_s=1e6)
    assert slow.forget(0.0) == slow
    assert slow.forget(30.0).wait_s == pytest.approx(1.01)
    assert slow.forget(30.0).bytes_s == pytest.approx(2e6, rel=0.01)
    assert slow.forget(3000.0).predict_s(1e6) == pytest.approx(Speed().predict_s(1e6))
    fast = Speed(wait_s=0.0001, bytes_s=2e10)
    assert fast.forget(3000.0) == fast


def test_orders_have_a_budget_too() -> None:
    assert budget_order(100, 0.001) == LEAST_ORDER_S
    assert budget_order(32_768, 0.001) == pytest.approx(98.3, rel=0.01)
    assert budget_order(32_768, 0.0) == budget_order(32_768, 0.001)


def test_the_idlest_prefill_node_computes() -> None:
    busy, idle = member("a", role="prefill", running=3), member("b", role="prefill", waiting=1)
    others = [member("c"), member("d", role="decode"), member("e", role="prefill", draining=True)]
    assert rank_providers([busy, idle, *others], {}) == [idle, busy]
    assert rank_providers([busy, idle, *others], {"b": 4}) == [busy, idle]
    assert rank_providers(others, {}) == []

"""The step plan: pure, so invariants are tried on thousands of states."""

from hypothesis import given
from hypothesis import strategies as st

from dsuf.sched.policy import Prefilling, choose_prefill, next_plan
from dsuf.types import PrefillRange, StepPlan

prompts = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 499)), max_size=8).map(
    lambda pairs: [Prefilling(f"p{i}", done % length, length) for i, (length, done) in enumerate(pairs)]
)


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert next_plan([], [], step=0, chunk_tokens=8) == StepPlan()


@given(st.lists(st.text(max_size=3), max_size=8, unique=True), prompts, st.integers(0, 9), st.integers(1, 300))
def test_every_decoding_turn_and_at_most_one_chunk(
    decoding: list[str], prefilling: list[Prefilling], step: int, chunk_tokens: int
) -> None:
    plan = next_plan(decoding, prefilling, step=step, chunk_tokens=chunk_tokens)
    assert plan.decode == tuple(decoding)
    assert len(plan.prefill) == min(1, len(prefilling))
    for part in plan.prefill:
        source = next(turn for turn in prefilling if turn.turn == part.turn)
        assert part.start == source.done
        assert 0 < part.stop - part.start <= chunk_tokens
        assert part.stop == min(source.length, part.start + chunk_tokens)


@given(prompts, st.integers(1, 64), st.integers(0, 1))
def test_no_prompt_starves(prefilling: list[Prefilling], chunk_tokens: int, step: int) -> None:
    """Run the policy to the end while a new short prompt arrives in every step: the oldest still ends in time."""
    state, oldest = list(prefilling), prefilling[:1]
    needed = -(-(oldest[0].length - oldest[0].done) // chunk_tokens) if oldest else 0
    for count in range(2 * needed):
        chosen = choose_prefill(state, step + count)
        assert chosen is not None
        done = min(chosen.length, chosen.done + chunk_tokens)
        state = [Prefilling(t.turn, done if t.turn == chosen.turn else t.done, t.length) for t in state]
        state = [turn for turn in state if turn.done < turn.length] + [Prefilling(f"new{count}", 0, 1)]
    assert not oldest or all(turn.turn != oldest[0].turn for turn in state)


def test_only_a_plan_that_decodes_has_drafts() -> None:
    waiting = [Prefilling("p", 0, 9)]
    assert next_plan(["d"], waiting, step=0, chunk_tokens=4, drafts=5).drafts == 5
    assert next_plan([], waiting, step=0, chunk_tokens=4, drafts=5).drafts == 0


def test_a_short_prompt_overtakes_a_long_one_in_every_second_step() -> None:
    long, short = Prefilling("long", 0, 10_000), Prefilling("short", 0, 100)
    assert next_plan(["d"], [long, short], step=0, chunk_tokens=256).prefill == (PrefillRange("long", 0, 256),)
    assert next_plan(["d"], [long, short], step=1, chunk_tokens=256).prefill == (PrefillRange("short", 0, 100),)


def test_equal_rests_go_by_age() -> None:
    assert choose_prefill([Prefilling("a", 0, 9), Prefilling("b", 1, 10)], 1) == Prefilling("a", 0, 9)

"""The step plan: pure, so invariants are tried on thousands of states, and promises on simulated hours."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.sched.cost import Cost, Shape
from dsuf.sched.fairness import Standing
from dsuf.sched.policy import Prefilling, Row, Rules, State, choose_prefill, choose_step
from dsuf.types import PrefillRange, StepPlan

CPU = Cost(step_s=0.001, row_s=0.014, token_s=0.00053, replay_s=0.0004)
GPU = Cost(step_s=0.002, row_s=0.00005, token_s=5e-6, replay_s=4e-6)
FREE = Cost()

costs = st.builds(
    Cost,
    step_s=st.floats(0, 0.05), row_s=st.floats(0, 0.05), draft_s=st.floats(0, 0.01), token_s=st.floats(0, 0.001),
    replay_s=st.floats(0, 0.001),
)  # fmt: skip
rules = st.builds(
    Rules, chunk_tokens=st.integers(1, 300), gap_s=st.floats(0.05, 1), drafts=st.integers(0, 5),
    replay_tokens=st.sampled_from([0, 16]),
)  # fmt: skip
tenants = st.sampled_from("abc")


@st.composite
def states(draw: st.DrawFn) -> State:
    """Any state that the loop could be in."""
    rows = [
        Row(turn=f"r{i}", tenant=draw(tenants), wait_s=draw(st.floats(0, 2))) for i in range(draw(st.integers(0, 8)))
    ]
    prompts = []
    for i in range(draw(st.integers(0, 6))):
        length = draw(st.integers(1, 500))
        done = draw(st.integers(0, length - 1))
        prompts.append(
            Prefilling(turn=f"p{i}", done=done, length=length, tenant=draw(tenants), priority=draw(st.integers(-1, 1)))
        )
    standings = {
        name: Standing(balance_s=draw(st.floats(-2, 0.5)), since_chunk_s=draw(st.floats(0, 3))) for name in "abc"
    }
    return State(rows=tuple(rows), prompts=tuple(prompts), standings=standings, chunks=draw(st.integers(0, 9)))


class Stream(msgspec.Struct):
    """A stream of the simulation: when it had its last token, how many it had, and the largest gap so far."""

    tenant: str
    last_s: float = 0.0
    tokens: int = 0
    gap_s: float = 0.0


class Simulation:
    """Tenants with endless streams and endless prompts, on an engine that takes exactly what the model says."""

    def __init__(self, cost: Cost, rules: Rules, load: Mapping[str, tuple[int, int, int]]) -> None:
        self.cost, self.rules = cost, rules
        self.now_s, self.steps, self.chunks = 0.0, 0, 0
        self.streams = {f"{name}{i}": Stream(name) for name, (rows, _, _) in load.items() for i in range(rows)}
        self.prompts = {
            f"{name}-p{i}": Prefilling(turn=f"{name}-p{i}", done=0, length=length, tenant=name)
            for name, (_, count, length) in load.items()
            for i in range(count)
        }
        self.balances_s: Mapping[str, float] = {}
        self.chunk_s: dict[str, float] = {}
        self.prefilled = dict.fromkeys(load, 0)

    def state(self) -> State:
        """What the policy sees."""
        names = {stream.tenant for stream in self.streams.values()} | {turn.tenant for turn in self.prompts.values()}
        rows = [
            Row(turn=n, tenant=stream.tenant, wait_s=self.now_s - stream.last_s) for n, stream in self.streams.items()
        ]
        standings = {
            name: Standing(
                balance_s=self.balances_s.get(name, 0.0), since_chunk_s=self.now_s - self.chunk_s.get(name, -1e9)
            )
            for name in names
        }
        return State(
            rows=tuple(rows), prompts=tuple(self.prompts.values()), standings=standings, chunks=self.chunks
        )  # fmt: skip

    def run(self, seconds: float) -> "Simulation":
        """Go on for so long."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            choice = choose_step(self.state(), self.cost, self.rules)
            self.now_s += self.cost.predict_s(choice.shape)
            self.balances_s, self.steps = choice.balances_s, self.steps + 1
            for name in choice.plan.decode:
                stream = self.streams[name]
                stream.gap_s = max(stream.gap_s, self.now_s - stream.last_s)
                stream.last_s, stream.tokens = self.now_s, stream.tokens + 1
            for part in choice.plan.prefill:
                self.take(part)
        return self

    def take(self, part: PrefillRange) -> None:
        """A chunk was computed; a prompt that is done is followed by another one."""
        turn = self.prompts[part.turn]
        self.chunks += 1
        self.chunk_s[turn.tenant] = self.now_s
        self.prefilled[turn.tenant] += part.stop - part.start
        self.prompts[part.turn] = msgspec.structs.replace(turn, done=part.stop if part.stop < turn.length else 0)

    def share(self, tenant: str) -> float:
        """The least rate of a stream of `tenant`, relative to what it had if the tenant were alone and decoded."""
        streams = [stream for stream in self.streams.values() if stream.tenant == tenant]
        alone_s = self.cost.predict_s(Shape(rows=len(streams)))
        return min(stream.tokens for stream in streams) * alone_s / self.now_s

    def gap_s(self) -> float:
        """The largest gap."""
        return max(stream.gap_s for stream in self.streams.values())


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert choose_step(State(), CPU, Rules()).plan == StepPlan()


@settings(deadline=None)
@given(states(), costs, rules)
def test_a_plan_is_within_the_state_and_never_empty_where_there_is_work(state: State, cost: Cost, rules: Rules) -> None:
    choice = choose_step(state, cost, rules)
    plan, names = choice.plan, [row.turn for row in state.rows]
    assert [name for name in names if name in plan.decode] == list(plan.decode), "in order, nobody twice"
    assert len(plan.prefill) <= 1
    assert bool(plan.decode or plan.prefill) == bool(state.rows or state.prompts)
    assert plan.drafts == (rules.drafts if plan.decode else 0)
    for part in plan.prefill:
        source = next(turn for turn in state.prompts if turn.turn == part.turn)
        rest = source.length - source.done
        assert part.start == source.done
        assert min(rest, rules.least_tokens, rules.chunk_tokens) <= part.stop - part.start
        assert part.stop - part.start <= min(rest, rules.chunk_tokens)
    tokens = sum(part.stop - part.start for part in plan.prefill)
    assert (choice.shape.rows, choice.shape.tokens) == (len(plan.decode), tokens)
    assert choice.expected_s == cost.predict_s(choice.shape)
    assert set(choice.balances_s) == {row.tenant for row in state.rows} | {turn.tenant for turn in state.prompts}


@settings(deadline=None)
@given(states(), costs, rules)
def test_a_chunk_never_pushes_a_step_over_the_bound_unless_it_is_the_least_one(
    state: State, cost: Cost, rules: Rules
) -> None:
    choice = choose_step(state, cost, rules)
    tokens = choice.shape.tokens
    if state.rows and tokens > rules.least_tokens and cost.token_s:
        waits = [row.wait_s for row in state.rows if row.turn in choice.plan.decode]
        room_s = rules.gap_s / cost.excess - max(waits, default=0.0)
        assert cost.predict_s(msgspec.structs.replace(choice.shape, replayed=0)) <= room_s + 1e-9


@settings(deadline=None)
@given(st.integers(1, 20_000), st.floats(1e-5, 0.01), st.floats(0.1, 10))
def test_a_chunk_alone_keeps_to_the_time_of_a_step(length: int, token_s: float, most_s: float) -> None:
    rules = Rules(chunk_tokens=16_384, most_s=most_s)
    state = State(prompts=(Prefilling(turn="p", done=0, length=length),))
    choice = choose_step(state, Cost(step_s=0.01, token_s=token_s), rules)
    tokens = choice.plan.prefill[0].stop
    assert choice.expected_s <= most_s + 1e-9 or tokens == min(length, rules.least_tokens)
    if 0.01 + (tokens + 17) * token_s < most_s:
        assert tokens == min(length, 16_384), "as long as there is time for"


@settings(deadline=None)
@given(states(), rules)
def test_one_tenant_and_free_batching_serve_every_row(state: State, rules: Rules) -> None:
    single = msgspec.structs.replace(
        state,
        rows=tuple(msgspec.structs.replace(row, tenant="a") for row in state.rows),
        prompts=tuple(msgspec.structs.replace(turn, tenant="a") for turn in state.prompts),
    )
    for cost, which in ((CPU, single), (FREE, state)):
        choice = choose_step(which, cost, rules)
        assert choice.plan.decode == tuple(row.turn for row in state.rows)
    assert bool(choose_step(single, CPU, rules).plan.prefill) == bool(state.prompts), "a chunk in every step"


def test_the_best_priority_is_first_then_oldest_and_shortest_in_turn() -> None:
    long, short = Prefilling(turn="long", done=0, length=10_000), Prefilling(turn="short", done=0, length=100)
    late = Prefilling(turn="late", done=0, length=5, priority=1)
    assert choose_prefill([late, long, short], 0) is long
    assert choose_prefill([late, long, short], 1) is short
    assert choose_prefill([late], 1) is late
    a, b = Prefilling(turn="a", done=0, length=9), Prefilling(turn="b", done=1, length=10)
    assert choose_prefill([a, b], 1) is a, "equal rests go by age"


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 64), st.integers(0, 1))
def test_no_prompt_starves(lengths: list[int], chunk_tokens: int, count: int) -> None:
    """A new short prompt arrives in every step: the oldest still ends in twice its own number of steps."""
    left = [Prefilling(turn=f"p{i}", done=0, length=length) for i, length in enumerate(lengths)]
    needed = -(-lengths[0] // chunk_tokens)
    for step in range(2 * needed):
        chosen = choose_prefill(left, count + step)
        done = min(chosen.length, chosen.done + chunk_tokens)
        left = [msgspec.structs.replace(turn, done=done) if turn is chosen else turn for turn in left]
        left = [turn for turn in left if turn.done < turn.length] + [Prefilling(turn=f"n{step}", done=0, length=1)]
    assert all(turn.turn != "p0" for turn in left)


@pytest.mark.parametrize("crowd", [2, 10, 30])
def test_the_smaller_of_two_tenants_keeps_half_of_its_rate(crowd: int) -> None:
    sim = Simulation(CPU, Rules(), {"small": (1, 0, 0), "large": (crowd, 0, 0)}).run(60)
    assert sim.share("small") >= 0.45
    assert sim.share("large") >= 0.4
    if 2 * CPU.predict_s(Shape(rows=crowd)) < 0.4:
        assert sim.gap_s() <= 0.5, "no row of the crowd waits longer than the bound"


def test_rows_of_a_crowd_take_turns() -> None:
    sim = Simulation(CPU, Rules(), {"small": (1, 0, 0), "large": (10, 0, 0)}).run(30)
    tokens = [stream.tokens for stream in sim.streams.values() if stream.tenant == "large"]
    assert max(tokens) - min(tokens) <= 0.2 * max(tokens)


def test_where_batching_is_free_nobody_yields() -> None:
    sim = Simulation(GPU, Rules(gap_s=0.25), {"small": (1, 0, 0), "large": (10, 0, 0)}).run(3)
    assert all(stream.tokens == sim.steps for stream in sim.streams.values())


@pytest.mark.parametrize("cost", [CPU, GPU])
@pytest.mark.parametrize("rows", [0, 6])
def test_a_flood_of_prompts_leaves_the_other_tenant_half_of_the_time(cost: Cost, rows: int) -> None:
    rules = Rules(gap_s=0.5, chunk_tokens=256 if cost is CPU else 8192)
    sim = Simulation(cost, rules, {"small": (1, 0, 0), "large": (rows, 10, 8000)}).run(30)
    assert sim.share("small") >= 0.4
    assert sim.gap_s() <= 0.5
    tokens_a_second = sim.prefilled["large"] / sim.now_s
    assert tokens_a_second >= (0.4 if not rows else 0.1) / cost.token_s, "and its prompts progress"


def test_three_tenants_have_a_third_each() -> None:
    sim = Simulation(CPU, Rules(), {"a": (1, 0, 0), "b": (2, 0, 0), "c": (6, 0, 0)}).run(60)
    assert all(sim.share(name) >= 0.3 for name in "abc")


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_pitfall_17_long_prompts_stop_nobodys_tokens(rows: int) -> None:
    """Prompts of the greatest length keep coming: every gap stays under the bound, and they progress."""
    sim = Simulation(CPU, Rules(gap_s=0.4), {"": (rows, 4, 65_000)}).run(60)
    assert sim.gap_s() <= 0.4
    assert sim.prefilled[""] >= 60 * 100
    assert min(stream.tokens for stream in sim.streams.values()) >= 60 / 0.4


def test_prompts_progress_even_where_the_bound_cannot_be_kept() -> None:
    sim = Simulation(CPU, Rules(gap_s=0.1), {"": (20, 2, 8000)}).run(30)
    assert sim.prefilled[""] == sim.steps * Rules().least_tokens


def test_balances_are_bounded_and_forgotten() -> None:
    sim = Simulation(CPU, Rules(gap_s=0.5), {"a": (1, 0, 0), "b": (30, 3, 900)}).run(20)
    assert all(-2.0 <= balance <= 0.5 for balance in sim.balances_s.values())
    del sim.streams["a0"]
    sim.run(1)
    assert set(sim.balances_s) == {"b"}

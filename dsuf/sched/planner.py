"""What the policy remembers from step to step: measured costs, balances of tenants, when prompts had a chunk."""

from collections.abc import Iterable

from dsuf.sched.cost import CostFit, Shape
from dsuf.sched.fairness import Standing
from dsuf.sched.held import Held
from dsuf.sched.policy import Choice, Row, Rules, State, choose_step
from dsuf.types import StepPlan

_SAMPLE_S = 0.02


class Planner:
    """Plans steps under `rules`. Times are those of `time.monotonic`."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.fit = CostFit()
        self._balances_s: dict[str, float] = {}
        self._chunk_s: dict[str, float] = {}
        self._chunks = 0
        self._last: Choice | None = None
        self._observed: Shape | None = None
        self._observe_s = 0.0

    def plan(self, held: Iterable[Held], begins_s: float) -> Choice | None:
        """The step to launch now, which is expected to begin at `begins_s`; None if there is nothing to do."""
        turns = list(held)
        rows = [turn for turn in turns if turn.decodes]
        prompts = tuple(part for turn in turns if (part := turn.prefilling) is not None)
        if not rows and not prompts:
            return None
        if not prompts and len({turn.turn.tenant for turn in rows}) == 1:
            return self._plan_all(rows)
        state = State(
            rows=tuple(
                Row(turn=turn.turn.id, tenant=turn.turn.tenant, wait_s=max(0.0, begins_s - turn.served_s))
                for turn in rows
            ),
            prompts=prompts, standings=self._standings(begins_s), chunks=self._chunks,
        )  # fmt: skip
        choice = choose_step(state, self.fit.cost, self.rules)
        self._balances_s = dict(choice.balances_s)
        self._note_chunks(choice, {turn.turn.id: turn.turn.tenant for turn in turns}, begins_s)
        return choice

    def observe(self, shape: Shape, seconds: float, now_s: float) -> None:
        """A step of `shape` took `seconds`. Of equal ones in quick succession a sample is enough."""
        if (shape.rows or shape.tokens) and (shape != self._observed or now_s >= self._observe_s):
            self._observed, self._observe_s = shape, now_s + _SAMPLE_S
            self.fit.observe(shape, seconds)

    def _plan_all(self, rows: list[Held]) -> Choice:
        """All rows of the only tenant there is, which is nearly always the plan before."""
        names = tuple(turn.turn.id for turn in rows)
        last = self._last
        if last is None or last.plan.decode != names or self.fit.steps % 64 == 0:
            shape = Shape(rows=len(names), drafts=self.rules.drafts)
            plan = StepPlan(decode=names, drafts=self.rules.drafts)
            last = Choice(plan=plan, shape=shape, expected_s=self.fit.cost.predict_s(shape), balances_s={})
        self._last, self._balances_s = last, {}
        return last

    def _standings(self, begins_s: float) -> dict[str, Standing]:
        """How tenants stand when the step begins."""
        names = self._balances_s.keys() | self._chunk_s.keys()
        never_s = float("-inf")
        return {
            name: Standing(
                balance_s=self._balances_s.get(name, 0.0),
                since_chunk_s=max(0.0, begins_s - self._chunk_s.get(name, never_s)),
            )
            for name in names
        }

    def _note_chunks(self, choice: Choice, tenants: dict[str, str], begins_s: float) -> None:
        """Remember whose prompts the step takes a chunk of; tenants that left long ago are forgotten."""
        for part in choice.plan.prefill:
            self._chunks += 1
            # In the midst of the step: rows that had a token at its begin did not have it since, those in it did.
            self._chunk_s[tenants[part.turn]] = begins_s + choice.expected_s / 2
        if len(self._chunk_s) > 2 * len(tenants) + 16:
            present = set(tenants.values())
            self._chunk_s = {name: at_s for name, at_s in self._chunk_s.items() if name in present}

"""What the policy remembers from step to step: measured costs, balances of tenants, when prompts had a chunk."""

from collections.abc import Iterable

from dsuf.sched.cost import CostFit, Shape
from dsuf.sched.fairness import Standing
from dsuf.sched.held import Held
from dsuf.sched.policy import Choice, Prefilling, Row, Rules, State, choose_step
from dsuf.types import StepPlan

_SAMPLE_S = 1.0  # a fit takes hundreds of microseconds on a cold cache
_LATE, _LATE_S = 1.5, 0.02  # what takes so much longer than expected is looked at sooner


class Planner:
    """Plans steps under `rules`. Times are those of `time.monotonic`."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.fit = CostFit()
        self._balances_s: dict[str, float] = {}
        self._chunk_s: dict[str, float] = {}
        self._chunks = 0
        self._last: Choice | None = None
        self._rows: list[Held] = []  # of that choice
        self._planned_steps = 0  # that were measured before it
        self._observed: Shape | None = None
        self._observed_s = 0.0

    def plan(self, held: Iterable[Held], begins_s: float) -> Choice | None:
        """The step to launch now, which is expected to begin at `begins_s`; None if there is nothing to do."""
        rows, prompts = list[Held](), list[Prefilling]()
        for turn in held:
            if turn.launched_tokens < turn.prompt_tokens:
                if turn.plannable:
                    prompts.append(turn.prefilling)
            elif turn.wants_token:
                rows.append(turn)
        if not rows and not prompts:
            self._last, self._rows = None, []
            return None
        if not prompts and (rows == self._rows or len({turn.turn.tenant for turn in rows}) == 1):
            return self._plan_all(rows)
        state = State(
            rows=tuple(
                Row(turn=turn.turn.id, tenant=turn.turn.tenant, wait_s=max(0.0, begins_s - turn.served_s))
                for turn in rows
            ),
            prompts=tuple(prompts), standings=self._standings(begins_s), chunks=self._chunks,
        )  # fmt: skip
        choice = choose_step(state, self.fit.cost, self.rules)
        self._balances_s = dict(choice.balances_s)
        self._note_chunks(choice, state, begins_s)
        return choice

    def observe(self, choice: Choice, seconds: float, now_s: float) -> None:
        """The step of `choice` took `seconds`. Of steps that only decode, and as before, a sample is enough."""
        shape = choice.shape
        if not (shape.rows or shape.tokens):
            return
        late = seconds > _LATE * choice.expected_s
        if shape.tokens or shape != self._observed or now_s - self._observed_s >= (_LATE_S if late else _SAMPLE_S):
            self._observed, self._observed_s = shape, now_s
            self.fit.observe(shape, seconds)

    def _plan_all(self, rows: list[Held]) -> Choice:
        """All rows of the only tenant there is, which is nearly always the plan before."""
        last = self._last
        if last is None or rows != self._rows or self.fit.steps != self._planned_steps:
            shape = Shape(rows=len(rows), drafts=self.rules.drafts)
            plan = StepPlan(decode=tuple(turn.turn.id for turn in rows), drafts=self.rules.drafts)
            last = Choice(plan=plan, shape=shape, expected_s=self.fit.cost.predict_s(shape), balances_s={})
        self._last, self._rows, self._planned_steps, self._balances_s = last, rows, self.fit.steps, {}
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

    def _note_chunks(self, choice: Choice, state: State, begins_s: float) -> None:
        """Remember whose prompts the step takes a chunk of; tenants that left long ago are forgotten."""
        tenants = {turn.turn: turn.tenant for turn in state.prompts}
        present = {*tenants.values(), *(row.tenant for row in state.rows)}
        for part in choice.plan.prefill:
            self._chunks += 1
            # In the midst of the step: rows that had a token at its begin did not have it since, those in it did.
            self._chunk_s[tenants[part.turn]] = begins_s + choice.expected_s / 2
        if len(self._chunk_s) > 2 * len(present) + 16:
            self._chunk_s = {name: at_s for name, at_s in self._chunk_s.items() if name in present}

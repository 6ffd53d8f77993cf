"""What the next step does: a pure function of the turns that the engine holds, what steps cost, and what is owed.

- No stream's gap between tokens goes over the bound for the sake of prompts: the chunk shrinks until the step that is
  expected stays under it, though never below a least chunk, so that prompts progress whatever happens.
- Every row is in every step as long as that is fair to the other tenants (`fairness`). The rows of a crowded tenant
  take turns, the one that has waited longest first, and none waits longer than the bound unless its own tenant alone
  is too much for it.
- One prompt has a chunk in a step: of the tenant that is owed most, in the best priority that it has, alternately the
  oldest one and the one with the shortest rest. A short prompt overtakes a long one and the oldest cannot starve.
"""

from collections.abc import Mapping, Sequence

import msgspec

from dsuf.sched.cost import Cost, Shape
from dsuf.sched.fairness import Share, Standing, may_add_chunk, may_add_row, open_share, settle
from dsuf.types import PrefillRange, StepPlan

FREE_RIDE = 0.05
"""Rows that lengthen a step by no more than this part ride along, whatever is owed."""
_EVEN = 16  # chunks are multiples of this, for the kernels' tiles


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a plan: prompt tokens a chunk at most, and at least where streams wait, the gap bound, drafts a row,
    tokens that the end of a prompt replays, and how long a step may be expected to take where no stream waits."""

    chunk_tokens: int = 256
    least_tokens: int = 16
    gap_s: float = 0.5
    drafts: int = 0
    replay_tokens: int = 0
    most_s: float = float("inf")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A decoding turn; when the step begins, its latest token is `wait_s` old."""

    turn: str
    tenant: str = ""
    wait_s: float = 0.0


class Prefilling(msgspec.Struct, frozen=True, kw_only=True):
    """A turn whose prompt of `length` positions is in the cache up to `done` (exclusive)."""

    turn: str
    done: int
    length: int
    tenant: str = ""
    priority: int = 0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made from. `prompts` are ordered oldest first; `chunks` counts those planned so far."""

    rows: tuple[Row, ...] = ()
    prompts: tuple[Prefilling, ...] = ()
    standings: Mapping[str, Standing] = msgspec.field(default_factory=dict)
    chunks: int = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its shape, how long it is expected to take, and the balances after it."""

    plan: StepPlan
    shape: Shape
    expected_s: float
    balances_s: Mapping[str, float]


def choose_step(state: State, cost: Cost, rules: Rules) -> Choice:
    """The next step. Its plan is empty exactly where there is nothing to do."""
    step = _Step(state, cost, rules)
    step.take_overdue()
    step.take_chunk()
    step.take_rows()
    return step.finish()


def choose_prefill(prompts: Sequence[Prefilling], count: int) -> Prefilling:
    """Of the best priority, the oldest if `count` is even and else the one with the shortest rest (then the oldest)."""
    best = min(turn.priority for turn in prompts)
    first = [turn for turn in prompts if turn.priority == best]
    return first[0] if count % 2 == 0 else min(first, key=lambda turn: turn.length - turn.done)


class _Step:
    """A step that is being composed."""

    def __init__(self, state: State, cost: Cost, rules: Rules) -> None:
        self.state, self.cost, self.rules = state, cost, rules
        self.bound_s = rules.gap_s / cost.excess  # the rest is for what the cost model does not see
        tenants = dict.fromkeys((*(row.tenant for row in state.rows), *(turn.tenant for turn in state.prompts)))
        self.waiting: dict[str, list[Row]] = {tenant: [] for tenant in tenants}  # longest wait last
        for row in sorted(state.rows, key=lambda row: row.wait_s):
            self.waiting[row.tenant].append(row)
        self.shares: dict[str, Share] = {
            tenant: open_share(self.standing(tenant).balance_s, len(rows), rules.drafts, cost)
            for tenant, rows in self.waiting.items()
        }
        self.due = {tenant for tenant in tenants if self.is_due(tenant)}  # whose turn it is to have a chunk
        self.order = sorted(tenants, key=lambda tenant: self.shares[tenant].balance_s)
        self.taken: set[str] = set()
        self.chunk: Prefilling | None = None
        self.tokens = 0

    def standing(self, tenant: str) -> Standing:
        """How `tenant` stands before the step."""
        return self.state.standings.get(tenant) or Standing()

    def expected_s(self, more_rows: int = 0) -> float:
        """How long the step takes as it is, or with more rows."""
        return self.cost.predict_s(self.shape(more_rows))

    def shape(self, more_rows: int = 0) -> Shape:
        """The shape of the step as it is, or with more rows."""
        rows = len(self.taken) + more_rows
        ends = self.chunk is not None and self.chunk.done + self.tokens == self.chunk.length
        replayed = self.replayed(self.chunk) if self.chunk is not None and ends else 0
        return Shape(rows=rows, drafts=self.rules.drafts if rows else 0, tokens=self.tokens, replayed=replayed)

    def replayed(self, turn: Prefilling) -> int:
        """Tokens that the end of the prompt of `turn` replays."""
        return min(turn.length, self.rules.replay_tokens)

    def take_row(self, tenant: str) -> None:
        """Put in the row of `tenant` that has waited longest."""
        self.taken.add(self.waiting[tenant].pop().turn)
        self.shares[tenant].taken += 1

    def take_overdue(self) -> None:
        """Put in rows that would otherwise wait longer than the bound, of tenants that could keep it alone."""
        for tenant, rows in self.waiting.items():
            alone_s = self.shares[tenant].alone_s
            while (
                rows and not self.is_crowded(tenant) and rows[-1].wait_s + self.expected_s(1) + alone_s > self.bound_s
            ):
                self.take_row(tenant)

    def is_crowded(self, tenant: str) -> bool:
        """Whether the rows of `tenant` are too many for its share to keep the bound."""
        return len(self.shares) * self.shares[tenant].alone_s > self.bound_s

    def is_due(self, tenant: str) -> bool:
        """Whether the tenant has prompts, and its rows have all had a token since its last chunk."""
        since_s = self.standing(tenant).since_chunk_s
        rows, prompts = self.waiting[tenant], any(turn.tenant == tenant for turn in self.state.prompts)
        return prompts and (len(self.shares) == 1 or all(row.wait_s <= since_s for row in rows))

    def take_chunk(self) -> None:
        """Put in a chunk of the tenant that is owed most, if that is fair."""
        for tenant in self.order:
            prompts = [turn for turn in self.state.prompts if turn.tenant == tenant]
            alone = not any(self.waiting.values()) and not self.taken
            if not prompts or not (alone or tenant in self.due):
                continue
            self.chunk = choose_prefill(prompts, self.state.chunks)
            others = sum(bool(rows) for name, rows in self.waiting.items() if name != tenant)
            self.tokens = self.fit_tokens(self.chunk, others + len(self.waiting[tenant]))
            if alone or may_add_chunk(tenant, self.shares, step_s=self.expected_s(others)):
                self.shares[tenant].chunk_s = self.chunk_s(tenant)
                return
            self.chunk, self.tokens = None, 0

    def chunk_s(self, tenant: str) -> float:
        """What the chunk counts for; a tenant without rows would have a step for it alone."""
        replayed = self.shape().replayed
        base_s = 0.0 if self.shares[tenant].rows else self.cost.step_s
        return base_s + self.cost.token_s * self.tokens + self.cost.replay_s * replayed

    def fit_tokens(self, turn: Prefilling, more_rows: int = 0) -> int:
        """Tokens of the prompt of `turn` that fit a step of the present rows, and `more_rows`, under the bound."""
        rest = turn.length - turn.done
        limit = min(rest, self.rules.chunk_tokens)
        if not self.state.rows:
            return self.fit_alone(limit)
        limit = min(limit, max(self.cost.known_tokens, self.rules.least_tokens))
        if not self.cost.token_s:
            return limit
        rows = len(self.taken) + more_rows
        rows_s = self.cost.predict_s(Shape(rows=rows, drafts=self.rules.drafts if rows else 0))
        room_s = self.room_s() - rows_s
        fits = int(max(0.0, min(limit, room_s / self.cost.token_s)))
        if fits < limit or (
            fits == rest and self.cost.token_s * rest + self.cost.replay_s * self.replayed(turn) > room_s
        ):
            fits = min(limit, max(min(fits, rest - 1) // _EVEN * _EVEN, self.rules.least_tokens))
        return fits

    def fit_alone(self, limit: int) -> int:
        """Of `limit` tokens those that a step without rows has time for: turns that come meanwhile wait for its end."""
        room_s = self.rules.most_s - self.cost.step_s
        if not self.cost.token_s or self.cost.token_s * limit <= room_s:
            return limit
        return min(limit, max(int(room_s / self.cost.token_s) // _EVEN * _EVEN, self.rules.least_tokens))

    def room_s(self) -> float:
        """How long the step may take: each row in it gets its token at its end, the others one step later."""
        waits_s = [row.wait_s for row in self.state.rows if row.turn in self.taken]
        for tenant, rows in self.waiting.items():
            if rows and not self.is_crowded(tenant):
                waits_s.append(rows[-1].wait_s + self.shares[tenant].alone_s)
        return self.bound_s - max(waits_s, default=0.0)

    def take_rows(self) -> None:
        """Put in all rows if that costs nearly nothing or is fair to everyone, else row by row what is."""
        left = sum(map(len, self.waiting.values()))
        before_s, after_s = self.expected_s(), self.expected_s(left)
        if len(self.shares) == 1 or after_s - before_s <= FREE_RIDE * before_s or self.suits_all(after_s):
            for tenant, rows in self.waiting.items():
                while rows:
                    self.take_row(tenant)
        else:
            self.share_out()

    def suits_all(self, step_s: float) -> bool:
        """Whether a step of `step_s` with every row in it leaves nobody owed more than before, or anything at all."""
        for name, share in self.shares.items():
            gained_s = share.alone_s + share.chunk_s - step_s / len(self.shares)
            if gained_s < min(0.0, -share.balance_s) or (self.saver_beside(name) and gained_s < self.least_gain(name)):
                return False
        return True

    def saver_beside(self, tenant: str) -> bool:
        """Whether another tenant than `tenant` with rows of its own waits until a chunk is fair."""
        return any(
            name != tenant and share.rows and not share.chunk_s and name in self.due
            for name, share in self.shares.items()
        )

    def least_gain(self, tenant: str) -> float:
        """What a step must add to the balance of `tenant` where another tenant saves for a chunk."""
        return self.shares[tenant].row_s / (2 * len(self.shares))

    def share_out(self) -> None:
        """Put in one row of each tenant, those owed most first, then further rows, while that is fair."""
        served: list[str] = [name for name, share in self.shares.items() if share.served_s]
        for tenant in self.order:
            if self.try_row(tenant, served):
                served.append(tenant)
        hopeful = [tenant for tenant in self.order if self.waiting[tenant]]
        while hopeful:
            step_s, count = self.expected_s(), len(self.shares)
            tenant = min(hopeful, key=lambda name: self.shares[name].after_s(step_s, count))
            if not self.try_row(tenant, self.order) or not self.waiting[tenant]:
                hopeful.remove(tenant)
        if not self.taken and self.chunk is None:
            self.take_row(max((name for name in self.order if self.waiting[name]), key=self.longest_wait_s))

    def try_row(self, tenant: str, against: Sequence[str]) -> bool:
        """Put in a row of `tenant` if it has one and that is fair to `against`."""
        saving = not self.shares[tenant].chunk_s and tenant in self.due
        others = [name for name in against if name != tenant]
        if not self.waiting[tenant] or not may_add_row(
            tenant, self.shares, step_s=self.expected_s(1), against=others, saving=saving
        ):
            return False
        self.take_row(tenant)
        return True

    def longest_wait_s(self, tenant: str) -> float:
        """How long the next row of `tenant` has waited."""
        return self.waiting[tenant][-1].wait_s

    def finish(self) -> Choice:
        """The plan; the chunk takes what room the rows have left it."""
        prefill: tuple[PrefillRange, ...] = ()
        if self.chunk is not None:
            self.tokens = self.fit_tokens(self.chunk)
            self.shares[self.chunk.tenant].chunk_s = self.chunk_s(self.chunk.tenant)
            prefill = (PrefillRange(self.chunk.turn, self.chunk.done, self.chunk.done + self.tokens),)
        decode = tuple(row.turn for row in self.state.rows if row.turn in self.taken)
        step_s = self.expected_s()
        return Choice(
            plan=StepPlan(prefill=prefill, decode=decode, drafts=self.rules.drafts if decode else 0),
            shape=self.shape(), expected_s=step_s,
            balances_s=settle(self.shares, step_s=step_s, gap_s=self.rules.gap_s),
        )  # fmt: skip

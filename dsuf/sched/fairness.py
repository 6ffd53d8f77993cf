"""Fair shares of engine time between tenants: pure arithmetic on what each of them has had.

With k tenants at work, each is entitled to a k-th of the time: to its own steps, as if it were alone, at a k-th of
their rate. A tenant's *balance* is what it got, in seconds of such steps, less its share of the time that passed. Below
zero it is owed something. Steps that serve all at once let all balances grow; so where batching is free nobody yields.
"""

from collections.abc import Mapping

import msgspec

from dsuf.sched.cost import Cost, Shape

LOWEST_GAPS, HIGHEST_GAPS = -4.0, 1.0
"""Bounds of a balance, in gap bounds: what is owed from long ago is forgotten, and nobody saves up for a flood."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's balance, and the seconds since a step last took some of its prompts (infinite: none did)."""

    balance_s: float = 0.0
    since_chunk_s: float = float("inf")


class Share(msgspec.Struct, kw_only=True):
    """What one tenant has in a step that is being composed.

    `alone_s` is a step over all its `rows` decode rows with nobody else in it. `taken` rows are in the step, and prompt
    tokens that take `chunk_s`.
    """

    balance_s: float
    rows: int
    alone_s: float
    taken: int = 0
    chunk_s: float = 0.0

    @property
    def row_s(self) -> float:
        """What one row counts for."""
        return self.alone_s / self.rows if self.rows else 0.0

    @property
    def served_s(self) -> float:
        """What the tenant gets of the step, in seconds of its own steps."""
        return self.taken * self.row_s + self.chunk_s

    def after_s(self, step_s: float, tenants: int) -> float:
        """Its balance after a step of `step_s`."""
        return self.balance_s + self.served_s - step_s / tenants


def open_share(balance_s: float, rows: int, drafts: int, cost: Cost) -> Share:
    """The share, still empty, of a tenant with so many decode rows."""
    alone_s = cost.predict_s(Shape(rows=rows, drafts=drafts)) if rows else 0.0
    return Share(balance_s=balance_s, rows=rows, alone_s=alone_s)


def may_add_row(tenant: str, shares: Mapping[str, Share], *, step_s: float, against: list[str], saving: bool) -> bool:
    """Whether one more row of `tenant`, which makes the step last `step_s`, is fair to the tenants in `against`.

    It must leave none of them both owed something and worse off than `tenant`. One that is `saving` for a chunk adds
    only what lets the others' balances grow.
    """
    count = len(shares)
    own = shares[tenant]
    least_s = min(0.0, own.balance_s + own.served_s)
    for name in against:
        other = shares[name]
        after_s = other.after_s(step_s, count)
        if after_s < least_s - 1e-9 or (saving and after_s - other.balance_s < other.row_s / (2 * count)):
            return False
    return True


def may_add_chunk(tenant: str, shares: Mapping[str, Share], *, step_s: float) -> bool:
    """Whether a chunk of `tenant` may go into a step that then lasts `step_s`: it is owed most, or none of the others
    is owed anything after a step that also serves one row of each."""
    others = [share for name, share in shares.items() if name != tenant]
    if all(shares[tenant].balance_s <= other.balance_s for other in others):
        return True
    return all(other.balance_s + other.row_s - step_s / len(shares) >= 0 for other in others)


def settle(shares: Mapping[str, Share], *, step_s: float, gap_s: float) -> dict[str, float]:
    """The balances after the step. Tenants that are not at work have none: nothing is owed to who wants nothing."""
    low_s, high_s = LOWEST_GAPS * gap_s, HIGHEST_GAPS * gap_s
    return {name: min(high_s, max(low_s, share.after_s(step_s, len(shares)))) for name, share in shares.items()}

"""Acceptance is exact: by enumeration of every draft and outcome on a small vocabulary, and by counting real draws."""

import itertools
from collections import Counter, defaultdict
from typing import get_args

import numpy as np
import pytest

from dsuf.reference.accept import AcceptanceRule, keep, keep_greedy, residual
from dsuf.reference.arithmetic import F64, I64

VOCABULARY, DRAFTS = 3, 3
Prefix = tuple[int, ...]
RULES = get_args(AcceptanceRule)


def random_model(rng: np.random.Generator, sharpness: float) -> dict[Prefix, F64]:
    """A distribution after every prefix."""
    return {
        prefix: rng.dirichlet(np.full(VOCABULARY, sharpness))
        for length in range(DRAFTS + 1)
        for prefix in itertools.product(range(VOCABULARY), repeat=length)
    }


def chances(rule: AcceptanceRule, p: F64, q: F64, drafts: I64) -> list[float]:
    """The probability of keeping 0 … k drafts, found from outside by where the rule's answer changes.

    A uniform number matters only through one threshold of its place, so probing one place at a time with the others
    fixed at the ends finds each threshold by bisection.
    """
    thresholds = [_threshold(rule, p, q, drafts, place) for place in range(len(drafts))]
    if rule == "token":
        passed = np.cumprod([1.0, *thresholds])
        return [*(passed[:-1] - passed[1:]), float(passed[-1])]
    missed = np.cumprod([1.0, *(1 - t for t in reversed(thresholds))])  # the longest that passes wins
    return [float(missed[-1]), *(missed[:-1] * thresholds[::-1])[::-1]]


def _threshold(rule: AcceptanceRule, p: F64, q: F64, drafts: I64, place: int) -> float:
    """Where in [0, 1] the number at `place` stops keeping its draft; earlier places pass, later ones fail."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        uniforms = np.where(np.arange(len(drafts)) < place, 0.0, 2.0)
        uniforms[place] = middle
        low, high = (middle, high) if keep(rule, p, q, drafts, uniforms) > place else (low, middle)
    return low


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_every_reply_has_the_probability_of_the_target(rule: AcceptanceRule, sharpness: float) -> None:
    rng = np.random.default_rng(4)
    target, draft = random_model(rng, sharpness), random_model(rng, 1.0)
    found: dict[Prefix, float] = defaultdict(float)
    for drafts in itertools.product(range(VOCABULARY), repeat=DRAFTS):
        p = np.stack([target[drafts[:i]] for i in range(DRAFTS + 1)])
        q = np.stack([draft[drafts[:i]] for i in range(DRAFTS)])
        drawn = float(np.prod([q[i, token] for i, token in enumerate(drafts)]))
        for kept, chance in enumerate(chances(rule, p, q, np.array(drafts))):
            for token, mass in enumerate(residual(rule, p, q, np.array(drafts), kept)):
                found[(*drafts[:kept], token)] += drawn * chance * float(mass)
    # Every reply is compared at full length: shorter rounds go on as the target does.
    for reply in itertools.product(range(VOCABULARY), repeat=DRAFTS):
        expected = np.prod([target[reply[:i]][token] for i, token in enumerate(reply)])
        rest = [np.prod([target[reply[:i]][reply[i]] for i in range(n, DRAFTS)]) for n in range(DRAFTS + 1)]
        shorter = sum(found[reply[:n]] * rest[n] for n in range(1, DRAFTS + 1))
        longer = sum(found[(*reply, token)] for token in range(VOCABULARY))
        assert shorter + longer == pytest.approx(expected, abs=1e-9)


def test_the_block_rule_keeps_no_fewer() -> None:
    rng = np.random.default_rng(8)
    kept: Counter[str] = Counter()
    for _ in range(300):
        p, q = rng.dirichlet(np.ones(4), DRAFTS + 1), rng.dirichlet(np.ones(4), DRAFTS)
        drafts = np.array([rng.choice(4, p=row) for row in q])
        for rule in RULES:
            kept[rule] += sum(keep(rule, p, q, drafts, rng.random(DRAFTS)) for _ in range(20))
    assert kept["block"] > kept["token"]


def test_equal_distributions_keep_everything() -> None:
    p = np.random.default_rng(1).dirichlet(np.ones(5), DRAFTS + 1)
    for rule in RULES:
        assert keep(rule, p, p[:DRAFTS], np.array([0, 3, 2]), np.full(DRAFTS, 1 - 1e-9)) == DRAFTS


@pytest.mark.parametrize(("drafts", "kept"), [([1, 2, 3], 3), ([1, 2, 9], 2), ([9, 2, 3], 0), ([], 0)])
def test_greedy_keeps_the_common_prefix(drafts: list[int], kept: int) -> None:
    assert keep_greedy(np.array([1, 2, 3, 4]), np.array(drafts, np.int64)) == kept

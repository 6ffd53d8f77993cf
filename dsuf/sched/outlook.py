"""How long computing a prompt would take now: a pure function of measured costs and of what is there already."""

from collections.abc import Sequence

import msgspec

from dsuf.sched.cost import Cost, Shape
from dsuf.sched.policy import Rules

LATE_S = 0.05
"""By how much a step has to be late, that this says anything."""
MOST_LATE = 4.0
"""A step that stands still says nothing of those after it."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt that came now would share the engine with: streams, and prompts with `rests` tokens to go.

    The step under way takes `step_tokens` of prompts, was `expected_s` long when it was launched (0: not known), and
    has taken `passed_s` so far.
    """

    rows: int = 0
    rests: Sequence[int] = ()
    step_tokens: int = 0
    expected_s: float = 0.0
    passed_s: float = 0.0


def predict_token_s(tokens: int, scene: Scene, cost: Cost, rules: Rules) -> float:
    """Seconds for each of `tokens` tokens of a prompt; 0 where nothing is known yet.

    Prompts share the steps, so each other one takes as much time as this one until it is done. A step under way that
    is late tells more of the machine as it is now than all that were measured before.
    """
    share = 1 + sum(min(rest, tokens) for rest in scene.rests) / tokens
    token_s = _chunk_token_s(scene.rows, cost, rules)
    if token_s:
        late = scene.expected_s and scene.passed_s > scene.expected_s + LATE_S
        return share * token_s * (min(MOST_LATE, scene.passed_s / scene.expected_s) if late else 1.0)
    return share * scene.passed_s / scene.step_tokens if scene.step_tokens else 0.0


def _chunk_token_s(rows: int, cost: Cost, rules: Rules) -> float:
    """Seconds a token in a chunk as long as the streams beside it bear."""
    chunk, rows_s = rules.chunk_tokens, 0.0
    if rows:
        rows_s = cost.predict_s(Shape(rows=rows, drafts=rules.drafts))
        if cost.token_s:
            room_s = rules.gap_s / cost.excess - rows_s
            chunk = min(chunk, max(rules.least_tokens, int(room_s / cost.token_s)))
    return max(rows_s, cost.step_s) / chunk + cost.token_s

"""What is trained when: stages by their share of the time, the buckets of each, the learning rate. Pure functions.

The recall stage ends when its gate is met. What follows is placed by the share of the whole training time that has
passed, so that a run of any length has the same course. In the last stage the indexers alone learn.
"""

import random
from typing import NamedTuple

from bench.nano.mode import Mode


class Pass(NamedTuple):
    """One kind of step: a bucket of data and a mode. Each is compiled and captured once."""

    bucket: str
    mode: Mode

    @property
    def label(self) -> str:
        """For logs: `short sparse quantised draft`."""
        words = ["dense" if self.mode.dense else "sparse"]
        words += ["quantised"] if self.mode.quantised else ["bf16"]
        words += [name for name in ("draft", "lesson") if getattr(self.mode, name)]
        return " ".join([self.bucket, *words])


class Stage(NamedTuple):
    """Passes with their shares of the steps, from one share of the time to the next stage's."""

    name: str
    start: float
    shares: tuple[tuple[Pass, float], ...]


PLAIN_DENSE = Mode(dense=True, quantised=False, draft=False)
PLAIN = Mode(dense=False, quantised=False, draft=False)
FULL_DENSE = Mode(dense=True, quantised=True, draft=True)
FULL = Mode(dense=False, quantised=True, draft=True)
LESSON = Pass("long", Mode(dense=True, quantised=True, draft=False, lesson=True))

RECALL = Stage("recall", 0.0, ((Pass("recall", PLAIN_DENSE), 1.0),))
LATER = (
    Stage("first mix", 0.0, ((Pass("short", PLAIN_DENSE), 0.85), (Pass("middle", PLAIN), 0.15))),
    Stage("mix", 0.22, ((Pass("short", PLAIN_DENSE), 0.6), (Pass("middle", PLAIN), 0.4))),
    Stage(
        "quantised",
        0.36,
        (
            (Pass("short", FULL_DENSE), 0.14),
            (Pass("short", FULL), 0.14),
            (Pass("middle", FULL), 0.39),
            (Pass("long", FULL), 0.29),
            (LESSON, 0.04),
        ),
    ),
    Stage("selection", 0.87, ((LESSON, 1.0),)),
)
SELECTION = LATER[-1]
WARM_STEPS = 50
DECAY_FROM = 0.5
LAST_PACE = 0.02

# The recall stage's gate: value tokens right, in so many checks so many steps apart; if it is not met, at most a share.
GATE_RIGHT = 0.97
GATE_CHECKS = 4
GATE_STEPS = 25
GATE_SHARE = 0.2


def passes() -> list[Pass]:
    """Every pass that a training takes, in the order of first use."""
    seen: dict[Pass, None] = {}
    for stage in (RECALL, *LATER):
        seen.update((item, None) for item, _ in stage.shares)
    return list(seen)


def find_stage(share: float, gate_open: bool) -> Stage:
    """The stage at a share of the time; recall holds until its gate opens or its time is up."""
    if not gate_open and share < GATE_SHARE:
        return RECALL
    return next(stage for stage in reversed(LATER) if stage.start <= share)


def pick_pass(stage: Stage, step: int, seed: int) -> Pass:
    """The pass of a step: drawn by the stage's shares, the same for the same seed."""
    items, shares = zip(*stage.shares, strict=True)
    return random.Random(f"{seed} {step}").choices(items, shares)[0]


def find_pace(step: int, share: float) -> float:
    """The factor on the learning rates: warm-up by steps, then constant, then linear down to the selection stage."""
    return min(1.0, (step + 1) / WARM_STEPS) * _fall(share, DECAY_FROM, SELECTION.start)


def find_lesson_pace(share: float) -> float:
    """The factor on a lesson's learning rate: constant, in the selection stage linear down to the end of the time."""
    return _fall(share, SELECTION.start, 1.0)


def _fall(share: float, start: float, end: float) -> float:
    """From 1 at `start` to `LAST_PACE` at `end`."""
    return 1.0 - (1 - LAST_PACE) * min(1.0, max(0.0, (share - start) / (end - start)))


class Gate:
    """Whether recall has formed: the last checks of the value tokens were all right enough."""

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open
        self._good = 0

    def check(self, right: float) -> bool:
        """Take the share of right value tokens over the last `GATE_STEPS` steps; returns whether the gate is open."""
        self._good = self._good + 1 if right >= GATE_RIGHT else 0
        self.is_open = self.is_open or self._good >= GATE_CHECKS
        return self.is_open

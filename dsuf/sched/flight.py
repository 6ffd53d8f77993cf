"""The steps that were launched and have not been looked at yet, in order.

The engine runs one of them; the next waits behind it, so that the engine never waits for the host. What a step takes is
the time from the end of the one before it, or from its launch, to its own end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dsuf.sched.held import Held
from dsuf.sched.policy import Choice
from dsuf.types import Engine, StepPlan, StepResult

DEPTH = 2


class Launched:
    """A step under way. `named` are the turns in its plan, those that it gives a token first; `ended_s` is set as soon
    as it comes back."""

    def __init__(
        self, choice: Choice, named: list[Held], giving: int, task: asyncio.Future[list[StepResult]]
    ) -> None:  # fmt: skip
        self.choice, self.named, self.giving, self.task = choice, named, giving, task
        self.launched_s = time.monotonic()
        self.ended_s: float | None = None

    @property
    def plan(self) -> StepPlan:
        """What the step does."""
        return self.choice.plan


class Flight:
    """Steps under way, oldest first. `on_landing` is called whenever one comes back."""

    def __init__(self, engine: Engine, on_landing: Callable[[], None]) -> None:
        self._engine = engine
        self._on_landing = on_landing
        self._steps: deque[Launched] = deque()
        self._before_s = 0.0  # when the step before the oldest one ended

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """Whether as many steps are under way as make sense."""
        return len(self._steps) >= DEPTH

    @property
    def running(self) -> int:
        """Turns that the oldest step names."""
        return len(self._steps[0].named) if self._steps else 0

    @property
    def since_s(self) -> float | None:
        """When the oldest step began; None if there is none or it has come back."""
        if not self._steps or self._steps[0].ended_s is not None:
            return None
        return max(self._before_s, self._steps[0].launched_s)

    @property
    def oldest(self) -> Choice | None:
        """What the oldest step does."""
        return self._steps[0].choice if self._steps else None

    @property
    def tasks(self) -> set[asyncio.Future[Any]]:
        """What is under way."""
        return {step.task for step in self._steps}

    def launch(self, choice: Choice, giving: list[Held], others: list[Held]) -> Launched:
        """Give the engine a step that gives a token to each of `giving`, and takes prompt of `others` too."""
        given = self._engine.step(choice.plan)
        task = given if isinstance(given, asyncio.Future) else asyncio.ensure_future(given)
        step = Launched(choice, [*giving, *others], len(giving), task)
        self._steps.append(step)
        for held in step.named:
            held.steps_under_way += 1
            held.latest = task
        for held in giving:
            held.coming_tokens += 1

        def land(done: asyncio.Future[list[StepResult]]) -> None:
            if not done.cancelled():
                done.exception()  # after the loop has stopped nobody is left who asks for it
            step.ended_s = time.monotonic()
            self._on_landing()

        task.add_done_callback(land)
        return step

    def land(self) -> list[tuple[Launched, float]]:
        """Take out the steps that have come back, oldest first, with the seconds that each took."""
        landed = []
        while self._steps and (ended_s := self._steps[0].ended_s) is not None:
            step = self._steps.popleft()
            seconds = ended_s - max(self._before_s, step.launched_s)
            self._before_s = ended_s
            for held in step.named:
                held.steps_under_way -= 1
            for held in step.named[: step.giving]:
                held.coming_tokens -= 1
            landed.append((step, max(seconds, 1e-6)))
        return landed

    def free_s(self, now_s: float) -> float:
        """When the engine can be expected to begin a step that is launched now."""
        at_s = self._before_s
        for step in self._steps:
            begun_s = max(at_s, step.launched_s)
            at_s = step.ended_s or max(now_s, begun_s + step.choice.expected_s)
        return max(now_s, at_s)

    def abandon(self) -> None:
        """Let go of the steps under way: they end by themselves or with the engine."""
        for step in self._steps:
            step.task.cancel()

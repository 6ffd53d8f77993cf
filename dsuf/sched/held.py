"""A turn in the engine, from attach to detach: what was launched for it and what has come back."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from dsuf.sched.policy import Prefilling
from dsuf.sched.ticket import TurnTicket
from dsuf.types import StepResult, Turn

Leaving = Literal["ended", "preempted", "unusable"]
"""Why no further step names a turn: it ended, is put back for another one, or its cache could not be filled."""


class Held:
    """One stay of a turn in the engine. `turn` is what was attached: where an earlier stay generated tokens, they are
    part of its prompt.

    Of its prompt `launched_tokens` are in steps under way or done, `done_tokens` came back. `coming_tokens` is what the
    decode steps under way give at least. `served_s` is when the latest token came, or is expected to come. While it is
    `filling`, or what it leaves behind is being read (`reading`), it cannot be detached.
    """

    def __init__(self, turn: Turn, ticket: TurnTicket, pages: tuple[int, ...], now_s: float) -> None:
        self.turn, self.ticket, self.pages = turn, ticket, pages
        self.prompt_tokens, self.max_tokens = len(turn.prompt.ids), turn.sampling.max_tokens
        self.attached_s = self.served_s = now_s
        self.ready = False
        self.done_tokens = 0
        self.launched_tokens = 0
        self.kept_tokens = 0
        self.generated_tokens = 0
        self.coming_tokens = 0
        self.steps_under_way = 0
        self.latest: asyncio.Future[list[StepResult]] | None = None  # the step launched for it last
        self.failed = False
        self.leaving: Leaving | None = None
        self.filling = False
        self.reading: set[asyncio.Task[Any]] = set()
        self.aside: asyncio.Task[bool] | None = None  # keeps what a turn that is put back goes on from
        self.settled = False

    @property
    def length(self) -> int:
        """Positions that are filled once the steps under way are done, at least: the last token is not fed yet."""
        return self.launched_tokens + max(0, self.generated_tokens + self.coming_tokens - 1)

    @property
    def plannable(self) -> bool:
        """Whether steps may name the turn."""
        return self.ready and self.leaving is None

    @property
    def prefilling(self) -> Prefilling:
        """What the policy needs to know of its prompt."""
        return Prefilling(
            turn=self.turn.id, done=self.launched_tokens, length=self.prompt_tokens, tenant=self.turn.tenant,
            priority=self.turn.priority,
        )  # fmt: skip

    @property
    def wants_token(self) -> bool:
        """Whether a turn whose prompt is launched can get a token in the next step."""
        return self.generated_tokens + self.coming_tokens < self.max_tokens and self.plannable

    @property
    def may_go(self) -> bool:
        """Whether nothing of it is under way any more, so that it can be detached."""
        return self.leaving is not None and not (self.steps_under_way or self.filling or self.reading)

    @property
    def lacks_state(self) -> bool:
        """Whether it was to be put back, and what it would go on from could not be kept."""
        if self.leaving != "preempted" or self.aside is None or self.ticket.ended:
            return False
        return self.aside.cancelled() or self.aside.exception() is not None or not self.aside.result()

    def stay(self) -> None:
        """It is not put back after all, now or later."""
        self.leaving, self.aside, self.settled = None, None, True

    def read(self, task: "asyncio.Task[Any]", on_end: Callable[[], None]) -> None:
        """`task` reads from the cache of the turn; `on_end` is called when it is done."""
        self.reading.add(task)

        def end(done: "asyncio.Task[Any]") -> None:
            self.reading.discard(done)
            on_end()

        task.add_done_callback(end)

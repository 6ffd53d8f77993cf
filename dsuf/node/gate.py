"""Where turns are submitted: the scheduler once there is one, a polite refusal before."""

from collections.abc import Callable

from dsuf.errors import Unavailable
from dsuf.types import Submit, Ticket, Turn

RETRY_S = 5


class Gate:
    """Implements `Submit` from before the engine is loaded."""

    def __init__(self) -> None:
        self.on_delivered: Callable[[], None] = lambda: None
        self._behind: Submit | None = None

    def open(self, behind: Submit) -> None:
        """From now on pass turns on to `behind`."""
        self._behind = behind
        behind.on_delivered = self.on_delivered

    def submit(self, turn: Turn) -> Ticket:
        """Pass `turn` on; raises `Unavailable` while the gate is closed, and what is raised behind it."""
        if self._behind is None:
            raise Unavailable("the server is starting", retry_after_s=RETRY_S)
        return self._behind.submit(turn)

"""Turns whose prompt another node computes: they queue here once it has come over, or has failed to."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from dsuf.observe.log import log_event
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Turn


class Source(Protocol):
    """Where the caches of prompts come from, other than from this node."""

    async def take(self, turn: Turn) -> int | None:
        """Have what there is of the prompt of `turn` come here; the position from which on it came, None if nothing
        did. What fails is computed here."""


class Intake:
    """Takes prompts over from `source`, each in a task of its own; `on_taken` hears of the end, however it ends.

    Prompts within a page are not worth the way: nothing of them would be handed over but their state.
    """

    def __init__(self, source: Source, page_tokens: int, on_taken: Callable[[TurnTicket], None]) -> None:
        self._source, self._page_tokens, self._on_taken = source, page_tokens, on_taken
        self._taking: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._taking)

    def begin(self, ticket: TurnTicket) -> bool:
        """Whether the prompt of `ticket` is now being taken over."""
        if len(ticket.turn.prompt.ids) <= self._page_tokens:
            return False
        self._taking[ticket.turn.id] = asyncio.create_task(self._take(ticket))
        return True

    def drop(self, turn: str) -> bool:
        """Take the prompt of `turn` over no further; whether it was on its way."""
        task = self._taking.pop(turn, None)
        if task is not None:
            task.cancel()
        return task is not None

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks = list(self._taking.values())
        for turn in list(self._taking):
            self.drop(turn)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, ticket: TurnTicket) -> None:
        """One prompt. Whatever fails, the turn goes on and computes what is missing."""
        try:
            ticket.peer_from = await self._source.take(ticket.turn)
        except Exception as error:
            log_event("hand-off failed", level="warning", error=error, turn=ticket.turn.id)
        if self._taking.pop(ticket.turn.id, None) is not None:  # it may have left in the last moment
            self._on_taken(ticket)

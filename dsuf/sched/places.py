"""The places of the engine: who holds one, with which pages. The only caller of attach and detach.

A turn leaves in two moves: from the first on no step names it, and what it leaves behind is being read; once that and
the steps that still name it are done, it is detached and its pages are released.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from dsuf.errors import EngineFailed, RequestError
from dsuf.kv.commit import is_due
from dsuf.kv.keeper import Step
from dsuf.kv.sessions import Sessions
from dsuf.observe.log import log_event
from dsuf.sched.held import Held, Leaving
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Engine, PrefillRange, Turn, Usage


class Places:
    """The turns that the engine holds, oldest first. `on_change` is called when one can be planned or detached."""

    def __init__(
        self, engine: Engine, sessions: Sessions, chunk_tokens: int, on_change: Callable[[], None]
    ) -> None:  # fmt: skip
        self._engine, self._sessions, self._on_change = engine, sessions, on_change
        self._chunk_tokens = chunk_tokens
        self._exact = engine.layout.replay_tokens == 0
        self._held: dict[str, Held] = {}
        self.get = self._held.get  # the stay of the turn of a name, if the engine holds it: asked for each result

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __contains__(self, turn: str) -> bool:
        return turn in self._held

    def __getitem__(self, turn: str) -> Held:
        return self._held[turn]

    def named(self, turns: Iterable[str]) -> list[Held]:
        """The stays of `turns`."""
        return [self._held[turn] for turn in turns]

    @property
    def free(self) -> int:
        """How many more turns the engine can hold."""
        return self._engine.facts.max_turns - len(self._held)

    def by_tenant(self) -> Counter[str]:
        """How many places each tenant holds that is not about to leave."""
        return Counter(held.turn.tenant for held in self if held.leaving is None)

    @property
    def leaving(self) -> bool:
        """Whether somebody is about to free a place."""
        return any(held.leaving is not None for held in self)

    def take(self, turn: Turn, ticket: TurnTicket, pages: tuple[int, ...]) -> Held:
        """Attach `turn`, which is filled next; gives the pages back and raises `RequestError` if it cannot be."""
        try:
            self._engine.attach(turn, pages)
        except RequestError:
            self._sessions.release(turn.id)
            raise
        except Exception as error:
            self._sessions.release(turn.id)
            log_event("attach failed", level="error", error=error, turn=turn.id)
            raise EngineFailed("the engine failed to begin this request") from error
        held = self._held[turn.id] = Held(turn, ticket, pages, time.monotonic())
        ticket.begin(held.attached_s)
        return held

    def fill(self, held: Held) -> asyncio.Task[None]:
        """Let the turn take over what is kept of its prompt; then it may be in steps, or leaves as unusable."""
        held.filling = True  # also before the task begins: the turn can end at once
        task = asyncio.create_task(self._fill(held))
        task.add_done_callback(lambda _: self._end_filling(held))
        return task

    async def _fill(self, held: Held) -> None:
        try:
            restored = await self._sessions.restore(held.turn)
        finally:
            self._end_filling(held)
        if restored is None:
            held.ticket.unfilled += 1
            held.leaving = held.leaving or "unusable"
            return
        held.launched_tokens = held.done_tokens = held.kept_tokens = restored.start
        held.ticket.take_over(
            Usage(
                device_tokens=restored.device_tokens,
                host_tokens=restored.host_tokens,
                peer_tokens=restored.peer_tokens,
            ),
            self._sessions.state_tokens(held.turn.id),
        )
        held.ready = True

    def _end_filling(self, held: Held) -> None:
        """Nothing is copied for the turn any more."""
        if held.filling:
            held.filling = False
            self._on_change()

    def count_own_pages(self, held: Held) -> int:
        """Pages that nobody else holds: what comes free when the turn leaves."""
        return sum(not self._sessions.pool.is_shared(page) for page in held.pages)

    def commit_chunk(self, part: PrefillRange, step: Step) -> None:
        """A step that brings a prompt to `part.stop` was just launched: ask for what is worth keeping there."""
        held = self._held[part.turn]
        if is_due(
            part.stop, prompt=held.prompt_tokens, kept=held.kept_tokens, chunk_tokens=self._chunk_tokens,
            exact=self._exact,
        ):  # fmt: skip
            held.kept_tokens = part.stop
            held.read(self._sessions.commit(held.turn, part.stop, step), self._on_change)

    def advance(self, held: Held, done_tokens: int) -> None:
        """The first `done_tokens` of the prompt came back computed."""
        if done_tokens > held.done_tokens:
            held.done_tokens = done_tokens
            self._sessions.advance(held.turn.id, done_tokens)
            if held.ticket.for_peer and done_tokens < held.prompt_tokens:
                held.read(self._sessions.commit_pages(held.turn, done_tokens), self._on_change)

    def dismiss(self, held: Held, why: Leaving, *, keep: bool = True) -> None:
        """No further step names the turn. What it has, after the steps under way, is kept unless it is spoilt."""
        worth = keep and held.leaving is None and held.ready and not held.failed
        if worth and held.length > held.kept_tokens:
            held.kept_tokens = held.length
            held.read(self._sessions.commit(held.turn, held.length, held.latest), self._on_change)
        held.leaving = held.leaving or why

    def can_put_back(self, held: Held) -> bool:
        """Whether the turn could go on later as if it had not been away.

        What it said must have followed from the same windows; in replay mode these are not computed again as they were.
        """
        if not self._needs_state(held):
            return True
        length = held.length + self._engine.layout.page_tokens  # the steps under way may give some more
        return held.ready and not held.settled and self._sessions.can_keep(held.turn.id, length)

    def put_back(self, held: Held) -> None:
        """The turn leaves for another one, unless what it needs to go on cannot be kept: then it stays."""
        if not self._needs_state(held):
            self.dismiss(held, "preempted")
            return
        held.leaving, held.kept_tokens = "preempted", held.length
        held.aside = self._sessions.put_aside(held.turn, held.length, held.latest)
        held.read(held.aside, self._on_change)

    def _needs_state(self, held: Held) -> bool:
        """Whether the turn has said something, or is about to, that can only go on from its state."""
        return not self._exact and bool(held.ticket.ids or held.launched_tokens >= held.prompt_tokens)

    def retire(self) -> list[Held]:
        """Detach the turns of which nothing is under way any more, and return them."""
        leaving = [held for held in self._held.values() if held.leaving is not None]
        if not leaving:
            return []
        for held in leaving:
            if held.may_go and held.lacks_state:
                log_event("turn stays", turn=held.turn.id, length=held.length)
                held.stay()
        gone = [held for held in leaving if held.may_go]
        for held in gone:
            if held.ticket.ended:
                self._sessions.give_up(held.turn.id)
            del self._held[held.turn.id]
            try:
                self._engine.detach(held.turn.id)
            except Exception as error:
                log_event("detach failed", level="error", error=error, turn=held.turn.id)
            self._sessions.release(held.turn.id)
        return gone

"""From the results of a turn to the events of its reply, and from there to the client."""

from collections.abc import AsyncGenerator
from functools import partial

from dsuf.api.exchange import Exchange
from dsuf.api.failure import internal_error
from dsuf.api.sse import EventStream, frame
from dsuf.errors import FormFailed, RequestError
from dsuf.observe.log import log_event
from dsuf.recipe.reader import Reader
from dsuf.types import Event, StepResult, Ticket, Usage


class Relay:
    """Reads a ticket's results. Most of them are pushed: read, and written, within the step that gave them, while the
    task that iterates `events` sleeps. It wakes for the first and the last, and for what a client does not take at
    once, so a client that reads too slowly is waited for there, and what it has not read stays with the ticket.
    """

    def __init__(self, ticket: Ticket, reader: Reader, exchange: Exchange) -> None:
        self.reader = reader
        self._ticket, self._exchange = ticket, exchange
        self._opened = self._decoding = False
        self._over = False
        self._error: Exception | None = None

    def push_to(self, stream: EventStream | None) -> None:
        """From now on push to `stream`; without one, events only go into the fold."""
        self._ticket.offer_to(self._fold if stream is None else partial(self._push, stream))

    async def events(self) -> AsyncGenerator[list[Event]]:
        """The events that were not pushed, by step, to the last; raises a `RequestError` where generation fails."""
        try:
            async for result in self._ticket:
                if events := self._read(result):
                    yield events
                if self._over:
                    return
            if not self._over:  # else the last ones were pushed
                raise internal_error()  # a ticket that ends without saying why
        except RequestError:
            raise
        except Exception as error:
            self._log(error)
            raise internal_error() from error

    def _push(self, stream: EventStream, result: StepResult) -> bool:
        """Write what `result` gives, if `stream` is free; whether it is."""
        if not stream.free:
            return False
        try:
            if events := self._read(result):
                stream.push(frame(events))
        except Exception as error:
            self._error = error  # the task hears of it as it wakes for `result`
            return False
        return True

    def _fold(self, result: StepResult) -> bool:
        """Read `result`; what it gives is in the fold."""
        try:
            self._read(result)
        except Exception as error:
            self._error = error
            return False
        return True

    def _read(self, result: StepResult) -> list[Event]:
        """The events of one step; raises what went wrong in an earlier one."""
        if self._error is not None:
            raise self._error
        if result.fault is not None:
            raise FormFailed(f"the reply could not be kept to its form: {result.fault}")
        if not self._decoding:
            self._note(result)
        events = [] if self._opened else self.reader.open(self._prompt_usage(result))
        self._opened = True
        events += self.reader.feed(result.ids, result.logprobs)
        if self.reader.finished:
            # A stop string: what else the engine makes, or has made in this step, is not wanted.
            self._ticket.cancel("stop", self.reader.completion_tokens)
        if self.reader.finished or result.finish is not None:
            self._over = True
            events += self.reader.finish(result.finish or "stop")
        return events

    def _note(self, result: StepResult) -> None:
        """Stage, and time of the first token."""
        self._exchange.stage = "decoding" if result.ids else "prefilling"
        if result.ids:
            self._decoding = True
            self._exchange.first_token_s = self._exchange.elapsed_s()

    def _prompt_usage(self, first: StepResult) -> Usage:
        """What the prompt cost, as its first result says."""
        return first.usage or Usage(computed_tokens=len(self._ticket.turn.prompt.ids))

    def _log(self, error: Exception) -> None:
        """A fault of ours."""
        log_event("turn failed", level="error", error=error, id=self._exchange.request_id, turn=self._ticket.turn.id)

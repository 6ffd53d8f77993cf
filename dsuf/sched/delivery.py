"""From the results of a step to the readers of its turns, and to the figures that are kept of them."""

from collections.abc import Iterable

from dsuf.kv.sessions import Sessions
from dsuf.observe.metrics import Metrics
from dsuf.sched.audit import Auditor
from dsuf.sched.endings import record_end
from dsuf.sched.held import Held
from dsuf.sched.places import Places
from dsuf.types import StepResult


class Delivery:
    """Hands results to tickets; a turn that has its last one is dismissed."""

    def __init__(self, places: Places, sessions: Sessions, metrics: Metrics, auditor: Auditor) -> None:
        self._places, self._sessions, self._metrics, self._auditor = places, sessions, metrics, auditor

    def deliver(self, results: Iterable[StepResult], now_s: float) -> None:
        """Hand on what came at `now_s`. Results for turns that left meanwhile are normal."""
        for result in results:
            held = self._places.get(result.turn)
            if held is None or held.ticket.ended:
                continue
            ticket = held.ticket
            self._places.advance(held, result.prefilled)
            if result.ids:
                self._time_tokens(held, len(result.ids), now_s)
            if result.drafted:
                self._metrics.count_drafts(result.drafted, result.accepted)
            ticket.feed(result)
            if result.finish is not None:
                ticket.stop_timers()
                record_end(ticket, result.finish, self._metrics)
                self._auditor.note(ticket)
                self._places.dismiss(held, "ended")

    def _time_tokens(self, held: Held, tokens: int, now_s: float) -> None:
        """Record when `tokens` more came. The first ones after a break say nothing about the gap between tokens."""
        ticket = held.ticket
        if not ticket.ids:
            self._metrics.observe_first_token(now_s - ticket.submitted_s)
        else:
            self._metrics.observe_tokens(tokens, now_s - ticket.latest_s)
        if held.generated_tokens:
            self._metrics.observe_gap(now_s - ticket.latest_s)
        else:
            self._sessions.trust(held.turn.id)
        held.generated_tokens += tokens
        held.served_s = max(held.served_s, now_s) if held.steps_under_way else now_s
        ticket.latest_s = now_s

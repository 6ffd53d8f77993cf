"""From the results of a step to the readers of its turns, and to the figures that are kept of them."""

from collections.abc import Iterable

from dsuf.errors import FormFailed
from dsuf.kv.sessions import Sessions
from dsuf.observe.metrics import Metrics
from dsuf.sched.audit import Auditor
from dsuf.sched.endings import record_end
from dsuf.sched.held import Held
from dsuf.sched.places import Places
from dsuf.sched.ticket import OVER
from dsuf.types import StepResult

Waits = dict[tuple[int, float], int]
"""How many turns got so many tokens, after ones that came at that time."""
Rounds = dict[tuple[int, int], int]
"""How many turns verified so many drafts and kept so many of them."""


class Delivery:
    """Hands results to tickets; a turn that has its last one is dismissed."""

    def __init__(self, places: Places, sessions: Sessions, metrics: Metrics, auditor: Auditor) -> None:
        self._places, self._sessions, self._metrics, self._auditor = places, sessions, metrics, auditor

    def deliver(self, results: Iterable[StepResult], now_s: float) -> bool:
        """Hand on what came at `now_s`; whether all of it was taken at once, and no reader has to wake first. Results
        for turns that left meanwhile are normal."""
        taken = True
        waits: Waits = {}
        rounds: Rounds = {}
        for result in results:
            held = self._places.get(result.turn)
            if held is None or (ticket := held.ticket).stage in OVER:
                continue
            if result.prefilled > held.done_tokens:
                self._places.advance(held, result.prefilled)
            if result.ids:
                self._time_tokens(held, len(result.ids), now_s, waits)
            if result.drafted:
                round_ = result.drafted, result.accepted
                rounds[round_] = rounds.get(round_, 0) + 1
            taken = ticket.feed(result) and taken
            if result.finish is not None:
                self._end(held, result.finish if result.fault is None else FormFailed.__name__)
        self._count(waits, rounds, now_s)
        return taken

    def _count(self, waits: Waits, rounds: Rounds, now_s: float) -> None:
        """Put into the figures what many turns of a step have in common."""
        for (tokens, latest_s), turns in waits.items():
            self._metrics.observe_tokens(tokens, now_s - latest_s, turns)
            self._metrics.observe_gap(now_s - latest_s, turns)
        for (drafted, accepted), turns in rounds.items():
            self._metrics.count_drafts(drafted, accepted, turns)

    def _end(self, held: Held, reason: str) -> None:
        """A turn has its last result; its reader makes an error of one that could not be kept to its form."""
        held.ticket.stop_timers()
        record_end(held.ticket, reason, self._metrics)
        self._auditor.note(held.ticket)
        self._places.dismiss(held, "ended")

    def _time_tokens(self, held: Held, tokens: int, now_s: float, waits: Waits) -> None:
        """Record when `tokens` more came. The first ones after a break say nothing about the gap between tokens.

        What is as ever goes to `waits`.
        """
        ticket = held.ticket
        if held.generated_tokens:
            wait = tokens, ticket.latest_s
            waits[wait] = waits.get(wait, 0) + 1
        else:
            if ticket.ids:
                self._metrics.observe_tokens(tokens, now_s - ticket.latest_s)
            else:
                self._metrics.observe_first_token(now_s - ticket.submitted_s)
            self._sessions.trust(held.turn.id)
        held.generated_tokens += tokens
        held.served_s = max(held.served_s, now_s) if held.steps_under_way else now_s
        ticket.latest_s = now_s

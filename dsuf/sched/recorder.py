"""Records of turns, for those who want to compute them again; only where an operator asked for them."""

import time
from collections.abc import Callable, Sequence

from dsuf.sched.held import Held
from dsuf.types import Constraint, Grammar, Origin, Recorded, StepPlan, TurnRecord


class Recorder:
    """Notes what the engine's plans have of each turn, and gives `write` the record of one that leaves the engine.

    Left out are turns with pictures, which a record has not, those that were put back, since what they went on from
    then is no other turn's, and those that failed.
    """

    def __init__(
        self, origin: Origin, encode: Callable[[str], Sequence[int]], write: Callable[[TurnRecord], None]
    ) -> None:
        self._origin, self._encode, self._write = origin, encode, write
        self._steps: dict[str, list[Recorded]] = {}
        self._begun_s: dict[str, float] = {}
        self._zero_s = time.time() - time.monotonic()  # clocks are put right now and then: order must not suffer

    def note_step(self, plan: StepPlan) -> None:
        """A step was launched."""
        now_s = self._zero_s + time.monotonic()
        for part in plan.prefill:
            self._begun_s.setdefault(part.turn, now_s)
            self._steps.setdefault(part.turn, []).append(Recorded("prefill", start=part.start, stop=part.stop))
        for turn in plan.decode:
            self._begun_s.setdefault(turn, now_s)
            self._steps.setdefault(turn, []).append(Recorded("decode", drafts=plan.drafts))

    def note_end(self, held: Held) -> None:
        """A turn left the engine, for whatever reason."""
        steps, begun_s = self._steps.pop(held.turn.id, None), self._begun_s.pop(held.turn.id, 0.0)
        ticket, turn = held.ticket, held.turn
        if not steps or held.failed or ticket.was_put_back or not ticket.ended or turn.prompt.spans:
            return
        source = ticket.source
        self._write(
            TurnRecord(
                turn=turn.id, begun_s=begun_s, origin=self._origin, prompt=turn.prompt.ids,
                opens_in=turn.prompt.opens_in, sampling=turn.sampling,
                grammar=self._read_grammar(turn.constraint), start=source.cached_tokens,
                state_tokens=ticket.state_tokens, device_tokens=source.device_tokens, host_tokens=source.host_tokens,
                peer_tokens=source.peer_tokens, steps=tuple(steps), ids=tuple(ticket.ids), finish=ticket.finish,
            )
        )  # fmt: skip

    def _read_grammar(self, constraint: Constraint | None) -> Grammar | None:
        """What the turn keeps to, as ids like all that is recorded."""
        if constraint is None:
            return None
        return Grammar(ids=tuple(self._encode(constraint.grammar)), begins=constraint.begins)

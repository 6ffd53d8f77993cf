"""What becomes of a turn that leaves: its record in log and metrics, or, where it was put back, how it goes on."""

import time

import msgspec

from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Turn


def record_end(ticket: TurnTicket, reason: str, metrics: Metrics) -> None:
    """Log and count the ending of a turn: `stop`, `length`, `abort`, or the name of an error."""
    total_s, usage = time.monotonic() - ticket.submitted_s, ticket.usage
    queue_s = total_s if ticket.attached_s is None else ticket.attached_s - ticket.submitted_s
    if reason in ("stop", "length", "abort"):
        metrics.finish_turn(reason, usage, total_s)
    else:
        metrics.fail_turn(reason)
    log_event(
        "turn ended",
        level="info" if ticket.for_peer else "debug",  # a client's turn has the line of its request
        turn=ticket.turn.id,
        reason=reason,
        stage=ticket.stage,
        prompt_tokens=len(ticket.turn.prompt.ids),
        completion_tokens=usage.completion_tokens,
        queue_s=round(queue_s, 4),
        total_s=round(total_s, 4),
    )


def continue_turn(ticket: TurnTicket) -> Turn:
    """The turn that goes on where `ticket` stands: what it generated is the end of its prompt.

    A draw depends on seed and position alone, so its tokens are those that it would have had without a break. Of a
    seeded turn with drafts only the distribution is the same, since rounds begin elsewhere. Where prompts are replayed
    the state in which the turn was put back is kept until then.
    """
    turn = ticket.turn
    prompt = msgspec.structs.replace(turn.prompt, ids=(*turn.prompt.ids, *ticket.ids))
    sampling = msgspec.structs.replace(turn.sampling, max_tokens=turn.sampling.max_tokens - len(ticket.ids))
    constraint = turn.constraint
    if constraint is not None:
        constraint = msgspec.structs.replace(constraint, spent=constraint.spent + len(ticket.ids))
    return msgspec.structs.replace(turn, prompt=prompt, sampling=sampling, constraint=constraint)

"""The values that cross layers, and the protocols that a layer asks of the one below it.

Values are frozen structs: a layer never hands another a live object of its own. Token ids are plain ints. Everything is
imported from here; the modules divide it by what it speaks of: turns, constraints, steps, caches, engines.
"""

from dsuf.types.cache import CacheLayout, Extent, SessionState
from dsuf.types.constraint import Allowed, Constraint, Mask, OpenMask
from dsuf.types.engine import Engine, EngineFacts
from dsuf.types.record import RECORD_VERSION, Grammar, Origin, Recorded, TurnRecord
from dsuf.types.step import Finish, Logprob, PrefillRange, StepPlan, StepResult, Usage
from dsuf.types.turn import Event, Prompt, Sampling, Span, Submit, Ticket, Times, Turn

__all__ = [
    "RECORD_VERSION", "Allowed", "CacheLayout", "Constraint", "Engine", "EngineFacts", "Event", "Extent", "Finish",
    "Grammar", "Logprob", "Mask", "OpenMask", "Origin", "PrefillRange", "Prompt", "Recorded", "Sampling",
    "SessionState", "Span", "StepPlan", "StepResult", "Submit", "Ticket", "Times", "Turn", "TurnRecord", "Usage",
]  # fmt: skip

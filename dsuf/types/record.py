"""What is written of a turn so that it can be computed again: token ids and numbers, no text and no pictures."""

from typing import Literal

import msgspec

from dsuf.types.turn import Sampling

RECORD_VERSION = 1


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """A part that one step had in a turn: positions `start` to `stop` of the prompt, or a round with so many drafts."""

    kind: Literal["prefill", "decode"]
    start: int = 0
    stop: int = 0
    drafts: int = 0


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The turn's constraint, its grammar as the `ids` of its text."""

    ids: tuple[int, ...]
    begins: Literal["now", "answer", "call"]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that computed a turn: its name, the fingerprint of weights, formats and way of prefilling, and what
    else its tokens hang on."""

    engine: str
    fingerprint: str
    prefill: Literal["replay", "exact"]
    max_drafts: int
    draft_rule: Literal["block", "token"]
    draft_confidence: float


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, from its prompt to its last token.

    It began to compute at `start`: the positions before it came from caches, by source, and with a state of
    `state_tokens` positions, 0 without one. `steps` are its parts of the engine's plans, in order; `ids` what came of
    them, as far as its reader wanted it. `begun_s` is when the first of them was launched, by the node's clock: records
    are written when turns end, and a turn can go on from what another leaves behind while that one still runs.
    """

    version: int = RECORD_VERSION
    turn: str
    begun_s: float = 0.0
    origin: Origin
    prompt: tuple[int, ...]
    opens_in: Literal["reasoning", "content", "call"]
    sampling: Sampling
    grammar: Grammar | None = None
    start: int
    state_tokens: int
    device_tokens: int
    host_tokens: int
    peer_tokens: int
    steps: tuple[Recorded, ...]
    ids: tuple[int, ...]
    finish: str | None = None

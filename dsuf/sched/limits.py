"""The bounds within which a scheduler works."""

from typing import Literal

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a scheduler: turns that wait, positions a chunk, drafts a step, the gap between a stream's tokens that
    prompts of others may cause, seconds a step, seconds between probes of an idle engine, failing steps in a row that
    make it not ready; how long a turn may wait for a place, and take in all
    (0: for ever); which share of greedy turns with drafts is computed again without, in idle time;
    and whether whole turns are computed here."""

    queue_limit: int = 64
    chunk_tokens: int = 256
    drafts: int = 0
    gap_s: float = 0.5
    step_deadline_s: float = 60.0
    probe_s: float = 5.0
    failing_steps: int = 3
    queue_timeout_s: float = 0.0
    turn_timeout_s: float = 0.0
    audit_share: float = 0.0
    role: Literal["both", "prefill", "decode"] = "both"

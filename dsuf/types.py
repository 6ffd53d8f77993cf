"""The values that cross layers, and the protocols that a layer asks of the one below it.

Values are frozen structs: a layer never hands another a live object of its own. Token ids are plain ints.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Literal, Protocol

import msgspec

Finish = Literal["stop", "length"]
"""Why generation ended: the end-of-sentence token, or `max_tokens`."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn chooses its tokens; every field is resolved, nothing here is "default".

    `temperature` 0 is greedy (arg-max, lowest id on ties) and ignores the others. `seed` fixes the tokens whatever else
    is in the batch.
    """

    temperature: float
    top_p: float
    seed: int
    max_tokens: int


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `start` to `stop` (exclusive) of a prompt that hold a picture, with the digest of its content."""

    start: int
    stop: int
    digest: bytes


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered prompt. `opens_in` says where generation starts, as the renderer left it; `salt` separates tenants."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    opens_in: Literal["reasoning", "content", "call"] = "content"
    salt: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request to generate: what the scheduler queues and an engine attaches."""

    id: str
    prompt: Prompt
    sampling: Sampling
    session: str = ""
    tenant: str = ""


class PrefillRange(msgspec.Struct, frozen=True):
    """Positions `start` to `stop` (exclusive) of a turn's prompt; the one that ends the prompt also yields a token."""

    turn: str
    start: int
    stop: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does in one step: prefill ranges, decode turns, and how many drafts each decode turn verifies."""

    prefill: tuple[PrefillRange, ...] = ()
    decode: tuple[str, ...] = ()
    drafts: int = 0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did for one turn.

    `ids` are the new tokens, without the end-of-sentence token. Of the drafts `drafted` were verified and `accepted`
    kept. `prefilled` is the number of prompt positions that are now in the cache. `finish` is set with the last tokens
    of a turn. `usage` comes with a turn's first result where some of the prompt was not computed for it; without one,
    all of it was.
    """

    turn: str
    ids: tuple[int, ...] = ()
    prefilled: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[float, ...] = ()
    finish: Finish | None = None
    usage: "Usage | None" = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by where their cache came from (they add up to the prompt) and generated tokens."""

    device_tokens: int = 0
    host_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this turn."""
        return self.device_tokens + self.host_tokens + self.peer_tokens

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.cached_tokens + self.computed_tokens


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a prefix, positions `start` to `stop` (exclusive), and where its cache rows are."""

    key: bytes
    start: int
    stop: int
    source: Literal["device", "host", "peer", "none"]


class Event(msgspec.Struct, frozen=True):
    """One event of a reply in the client's protocol: the SSE event name (None where there is none) and its JSON."""

    name: str | None
    data: str


class SessionCache(msgspec.Struct, frozen=True, kw_only=True):
    """A session's cache for its first `length` positions: a commit point, from which a turn can go on exactly.

    `fingerprint` names weights, layout and way of prefilling. `ids` holds the token ids of the positions, 8 bytes each,
    little-endian; `parts` the rest, bytes by name. Up to `spare` of the last positions may be left off and the result
    is still a state that the session went through. Where `repeats` is set, a prompt that ends at `length` exactly may
    leave off its last position, whatever `spare` says.
    """

    fingerprint: str
    length: int
    ids: bytes
    parts: Mapping[str, bytes]
    spare: int = 0
    repeats: bool = False


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the layers above need to know of a loaded engine; a plan may ask it to verify up to `max_drafts` drafts."""

    name: str
    device: str
    context_tokens: int
    max_turns: int
    vocabulary: int
    eos_id: int
    max_drafts: int = 0


class Engine(Protocol):
    """A loaded model. Only one `step`, export or import runs at a time; no call computes on the event loop.

    `attach` reserves what the turn can ever need and raises `QueueFull` where it does not fit now, `ContextTooLong`
    where it never can. `step` raises only when the engine itself failed: every turn in the plan is lost then. `detach`
    frees all of a turn's memory, is idempotent, and is never called while a step with that turn runs. `fingerprint` is
    that of the caches it exports and takes.
    """

    facts: EngineFacts
    fingerprint: str

    def attach(self, turn: Turn) -> None:
        """Reserve a cache for `turn`."""

    async def step(self, plan: StepPlan) -> list[StepResult]:
        """Run one step; one result a turn of the plan, in any order."""

    def detach(self, turn: str) -> None:
        """Forget the turn named `turn`."""

    async def export_session(self, turn: str) -> SessionCache:
        """Copy out the cache of an attached turn, as the last step left it."""

    async def import_session(self, turn: str, cache: SessionCache, length: int) -> None:
        """Fill the empty cache of an attached turn with the first `length` positions of `cache`.

        Raises `CheckpointError` if the fingerprint or the size of a part differs. Failed or cancelled, it leaves the
        turn as it was.
        """

    def counters(self) -> Mapping[str, int]:
        """What is held now, by name (turns, cache bytes): all zero when idle."""

    async def close(self) -> None:
        """Wait for the running step, then free everything."""


class Ticket(Protocol):
    """A submitted turn as its reader sees it: an iterator of results; one with `finish` or a `RequestError` ends it."""

    turn: Turn

    def __aiter__(self) -> AsyncIterator[StepResult]:
        """Results in order. Results with no ids report prefill progress."""

    def cancel(self, reason: Literal["abort", "stop"] = "abort", used_tokens: int | None = None) -> None:
        """Leave, at any stage; idempotent. All that the turn holds is freed before the next step but one.

        `reason` is for the record: the client left, or the reply is complete (a stop string); so is `used_tokens`, how
        many of the generated tokens the reply has, where that is not all.
        """


class Submit(Protocol):
    """What `api/` asks of the scheduler."""

    def submit(self, turn: Turn) -> Ticket:
        """Queue a turn; raises `QueueFull`, `Unavailable` or `ContextTooLong` at once."""

"""What the HTTP layer is built from: settings, and the services it asks of other layers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from dsuf.api.keyring import Keyring
from dsuf.api.outbox import Outbox
from dsuf.api.quota import Quotas
from dsuf.observe.traces import TurnTrace
from dsuf.recipe.masks import Masks
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import EngineFacts, Submit

T = TypeVar("T")

CONVERSIONS = 2
"""Request texts that are converted at once: a body of the largest size takes gigabytes while it is."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and switches of the HTTP layer.

    `context_tokens` is the served context; with `clamp_max_tokens` a `max_tokens` beyond what the prompt leaves of it
    is lowered instead of refused. `write_timeout_s` bounds how long a client may refuse to read. `drain_retry_s` goes
    into `Retry-After` while draining. `node` is told in each response, unless it is empty. Pages from `cors_origins`
    may use the server. `checkpoint` is told by `/server_info`, since the names of the models do not tell it.
    """

    context_tokens: int
    body_limit_bytes: int = 64 << 20
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    drain_retry_s: int = 2
    clamp_max_tokens: bool = True
    node: str = ""
    checkpoint: str = ""
    cors_origins: tuple[str, ...] = ()


class Readiness(msgspec.Struct, frozen=True):
    """Whether new turns are taken; if not, the parts that fail, by name. What is `degraded` is no reason not to."""

    ready: bool
    failing: Sequence[str] = ()
    degraded: Sequence[str] = ()


class Status(Protocol):
    """What the node knows of itself."""

    @property
    def draining(self) -> bool:
        """No new turn is taken; the running ones finish."""

    def liveness(self) -> Readiness:
        """Whether process and engine are alive (a draining node is)."""

    def readiness(self) -> Readiness:
        """Whether a load balancer should send turns here."""

    def metrics_text(self) -> bytes:
        """All metrics in the Prometheus text format."""

    def facts(self) -> Mapping[str, object]:
        """Configuration for `/server_info`, free of secrets."""

    def flush_cache(self) -> int:
        """Drop the prefix cache as far as nobody uses it; how many commit points that were."""


class Metrics(Protocol):
    """What the HTTP layer counts; times and tokens of turns are the scheduler's to observe."""

    def count_response(self, endpoint: str, status: int) -> None:
        """One response; `endpoint` is the canonical path or "other", status 499 a client that left before it."""

    def count_disconnect(self, stage: str) -> None:
        """One client that left while its turn was reading, rendering, queued, prefilling, decoding or writing."""

    def count_conversion_error(self, endpoint: str) -> None:
        """One request that the renderer refused."""

    def count_malformed_call(self) -> None:
        """One reply with a tool call block that the library dropped."""


class Traces(Protocol):
    """Where traces of turns go."""

    def record(self, turn: TurnTrace) -> None:
        """One turn that is over; does not wait."""


SETTINGS = web.AppKey("settings", Settings)


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `build_app` needs; `masks` where the engine keeps to constraints."""

    submit: Submit
    vocabulary: Vocabulary
    facts: EngineFacts
    status: Status
    metrics: Metrics
    settings: Settings
    masks: Masks | None = None
    keys: Keyring = msgspec.field(default_factory=Keyring)
    quotas: Quotas = msgspec.field(default_factory=Quotas)
    traces: Traces | None = None
    outbox: Outbox = msgspec.field(default_factory=Outbox)
    conversions: asyncio.Semaphore = msgspec.field(default_factory=lambda: asyncio.Semaphore(CONVERSIONS))

    async def convert(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work`, a conversion of a request's text, in a thread; at most `CONVERSIONS` at the same time."""
        async with self.conversions:
            return await asyncio.to_thread(work, *arguments)

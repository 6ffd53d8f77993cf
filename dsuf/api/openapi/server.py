"""What the routes that tell about the server, and those that only count tokens, have on the wire."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsuf.api.openapi.chat import Message
from dsuf.api.openapi.shared import Count


class ModelEntry(msgspec.Struct, omit_defaults=True):
    """A name that requests may carry; both lengths are the served context in tokens. The last three fields are there
    for clients that send `anthropic-version`."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count
    context_window: Count
    type: Literal["model"] | None = None
    display_name: str | None = None
    created_at: str | None = None


class ModelList(msgspec.Struct, omit_defaults=True):
    """All of them. The last three fields are there for clients that send `anthropic-version`."""

    object: Literal["list"]
    data: Annotated[list[ModelEntry], Meta(min_length=1)]
    has_more: bool | None = None
    first_id: str | None = None
    last_id: str | None = None


class TokenizeRequest(msgspec.Struct, omit_defaults=True):
    """A text, in which special tokens are recognised; or a conversation, which is rendered first."""

    prompt: str | None = None
    messages: list[Message] | None = None


class TokenizeReply(msgspec.Struct):
    """Its tokens."""

    count: Count
    max_model_len: Count
    tokens: list[Count]


class DetokenizeRequest(msgspec.Struct):
    """Tokens."""

    tokens: list[Count]


class DetokenizeReply(msgspec.Struct):
    """Their text."""

    prompt: str


class HealthReply(msgspec.Struct, omit_defaults=True):
    """Whether process and engine are alive, and what is not."""

    alive: bool
    failing: list[str]
    degraded: list[str] = []


class ReadinessReply(msgspec.Struct, omit_defaults=True):
    """Whether turns are welcome, what fails, and what fails without being a reason against it."""

    ready: bool
    failing: list[str]
    degraded: list[str] = []


class VersionReply(msgspec.Struct):
    """The server's version."""

    version: str


class FactsReply(msgspec.Struct):
    """Engine and configuration, no secrets; more fields than these."""

    version: str
    model: str
    checkpoint: str
    engine: dict[str, Any]
    context_tokens: Count
    node: dict[str, Any]


class FlushReply(msgspec.Struct):
    """How many commit points were dropped."""

    flushed: Count

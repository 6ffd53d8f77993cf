"""Raw text completion on the wire."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsuf.api.openapi.chat import StreamOptions
from dsuf.api.openapi.shared import (
    Count,
    MaxTokens,
    Model,
    Priority,
    Seed,
    Stops,
    StopString,
    Temperature,
    TopP,
    Usage,
)


class CompletionRequest(msgspec.Struct, omit_defaults=True):
    """A request to continue a text, or to fill the gap before `suffix`."""

    model: Model
    prompt: str
    suffix: str | None = None
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, Meta(description="only with stream: true")] = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: StopString | Stops | None = None
    echo: Annotated[bool, Meta(description="not together with suffix or logprobs")] = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user_id: str | None = None
    priority: Priority | None = None


class CompletionChoice(msgspec.Struct):
    """The text and why it ended."""

    text: str
    index: Count
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "content_filter"]


class CompletionReply(msgspec.Struct):
    """A whole reply."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: Annotated[list[CompletionChoice], Meta(min_length=1, max_length=1)]
    usage: Usage
    system_fingerprint: str | None

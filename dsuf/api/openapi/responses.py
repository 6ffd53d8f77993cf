"""OpenAI's Responses on the wire, as far as it is served: nothing is kept between two requests."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsuf.api.openapi.shared import (
    Count,
    Effort,
    MaxTokens,
    Model,
    Name,
    Priority,
    ReplyDetails,
    Schema,
    SourceDetails,
    Temperature,
    TopP,
)


class Reasoning(msgspec.Struct, omit_defaults=True):
    """How much the model thinks."""

    effort: Effort | None = None


class ResponsesTool(msgspec.Struct, omit_defaults=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    parameters: Schema
    description: str | None = None


class ResponsesRequest(msgspec.Struct, omit_defaults=True):
    """A request for what comes next. `input` is a text, or items: messages, calls, what calls gave, reasoning."""

    model: Model
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    reasoning: Reasoning | None = None
    tools: list[ResponsesTool] | None = None
    text: Annotated[dict[str, Any] | None, Meta(description="`format`: text, json_object or json_schema")] = None
    user_id: str | None = None
    priority: Priority | None = None


class ResponsesUsage(msgspec.Struct):
    """Tokens of a request."""

    input_tokens: Count
    input_tokens_details: SourceDetails
    output_tokens: Count
    output_tokens_details: ReplyDetails
    total_tokens: Count


class InputTokensReply(msgspec.Struct):
    """How many tokens the prompt of a request has."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class ResponsesReply(msgspec.Struct):
    """A whole reply; `output` are items: reasoning, messages, calls."""

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None

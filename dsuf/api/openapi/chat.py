"""Chat Completions on the wire."""

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
    Schema,
    Seed,
    Stops,
    StopString,
    Temperature,
    Thinking,
    TopP,
    Usage,
)


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class CallFunction(msgspec.Struct):
    """What is called; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CallFunction


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a conversation; `tool_call_id` names the call that a tool's message answers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    prefix: Annotated[bool, Meta(description="the reply continues this last message of the assistant")] = False


class ToolFunction(msgspec.Struct, omit_defaults=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(msgspec.Struct, omit_defaults=True):
    """How a stream tells its usage."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Meta(description="in every event, not only in the last")] = False


class ChatRequest(msgspec.Struct, omit_defaults=True):
    """A request for the next message of a conversation."""

    model: Model
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, Meta(description="only with stream: true")] = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: StopString | Stops | None = None
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | dict[str, Any] | None,
        Meta(description="required and a named function only with thinking disabled"),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None, Meta(description="text, json_object, json_schema or regex, by `type`")
    ] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="only with logprobs: true")] | None = None
    user_id: Annotated[str | None, Meta(description="keeps this user's cached prefixes apart from others'")] = None
    priority: Priority | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct):
    """The reply and why it ended."""

    index: Count
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]


class ChatReply(msgspec.Struct):
    """A whole reply."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: Annotated[list[ChatChoice], Meta(min_length=1, max_length=1)]
    usage: Usage
    system_fingerprint: str | None

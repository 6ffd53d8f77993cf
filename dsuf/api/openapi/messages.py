"""Anthropic's Messages on the wire."""

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
    SourceDetails,
    Stops,
    Temperature,
    Thinking,
    TopP,
)


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning; it is sent back with the conversation."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextBlock] = ""


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct, omit_defaults=True):
    """A tool that the model may call."""

    name: Name
    input_schema: Schema
    description: str | None = None


class OutputConfig(msgspec.Struct, omit_defaults=True):
    """How much the model thinks, and the form of its answer."""

    effort: Effort | None = None
    format: Annotated[dict[str, Any] | None, Meta(description="json_schema, with `schema`")] = None


class Metadata(msgspec.Struct, omit_defaults=True):
    """Who asks."""

    user_id: Annotated[str | None, Meta(description="keeps this user's cached prefixes apart from others'")] = None


class CountRequest(msgspec.Struct, omit_defaults=True):
    """A conversation whose prompt is counted."""

    model: Model
    messages: Annotated[list[MessagesMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, omit_defaults=True):
    """A request for the next message of a conversation."""

    max_tokens: MaxTokens | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop_sequences: Stops | None = None
    output_config: OutputConfig | None = None
    tool_choice: dict[str, Any] | None = None
    metadata: Metadata | None = None
    priority: Priority | None = None


class CountReply(msgspec.Struct):
    """Tokens of the prompt."""

    input_tokens: Count


class MessagesUsage(msgspec.Struct):
    """Tokens of a request; `input_tokens` are those that no cache had."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    service_tier: str
    prompt_tokens_details: SourceDetails


class MessagesReply(msgspec.Struct):
    """A whole reply."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: Literal["end_turn", "stop_sequence", "tool_use", "max_tokens"]
    stop_sequence: str | None
    usage: MessagesUsage

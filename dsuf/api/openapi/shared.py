"""What several protocols have in common on the wire: errors, usage, sampling, tools."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsuf.recipe.names import LISTED_NAMES

Model = Annotated[str, Meta(description="a name of `GET /v1/models`", extra_json_schema={"enum": list(LISTED_NAMES)})]
Temperature = Annotated[float, Meta(ge=0, le=2, description="with thinking it is always 1, whatever is sent")]
TopP = Annotated[float, Meta(gt=0, le=1, description="with thinking at least 0.95, without it 1")]
MaxTokens = Annotated[int, Meta(ge=1, le=393_216, description="tokens of the reply, reasoning included")]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1, description="the same seed gives the same reply")]
Priority = Annotated[int, Meta(ge=-100, le=100, description="lower goes first; with keys from 0")]
StopString = Annotated[str, Meta(min_length=1)]
Stops = Annotated[list[StopString], Meta(max_length=16)]
Schema = Annotated[dict[str, Any], Meta(description="a JSON schema of type object")]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
Count = Annotated[int, Meta(ge=0)]


class Thinking(msgspec.Struct):
    """Whether the model reasons before it answers; enabled where nothing is said."""

    type: Literal["enabled", "adaptive", "disabled"]


class SourceDetails(msgspec.Struct):
    """Where the tokens of a prompt came from; device, host, peer and computed add up to the prompt."""

    cached_tokens: Count
    device_tokens: Count
    host_tokens: Count
    peer_tokens: Count
    computed_tokens: Count


class ReplyDetails(msgspec.Struct):
    """Of the reply's tokens those of reasoning, and the steps that it took."""

    decode_steps: Count
    reasoning_tokens: Count = 0


class Usage(msgspec.Struct):
    """Tokens of a request in OpenAI's older protocols."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: SourceDetails
    completion_tokens_details: ReplyDetails
    prompt_cache_hit_tokens: Count
    prompt_cache_miss_tokens: Count


class ErrorDetail(msgspec.Struct):
    """What went wrong, for people (`message`) and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """An error in OpenAI's form."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorReply(msgspec.Struct):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str

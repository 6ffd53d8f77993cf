"""A request body of any protocol -> prompt ids, resolved sampling, and the reader for the reply.

Everything here is CPU work without waiting: run it in a thread.
"""

import secrets
from typing import Literal

import deepseek_recipe
import msgspec
from deepseek_recipe import ConversationRequest

from dsuf.errors import UnsupportedFeature
from dsuf.recipe.completion import convert_completion
from dsuf.recipe.constraints import find_constraint
from dsuf.recipe.conversion import (
    Conversion,
    ConversionRefused,
    Convert,
    Protocol,
    convert_chat,
    convert_messages,
    convert_responses,
    read,
)
from dsuf.recipe.masks import Masks
from dsuf.recipe.reader import Reader
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Constraint, Prompt, Sampling

CONVERT: dict[Protocol, Convert] = {
    "chat": convert_chat, "messages": convert_messages, "responses": convert_responses,
    "completions": convert_completion,
}  # fmt: skip
_LARGEST_SEED = 2**63


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The served context, whether a `max_tokens` beyond what the prompt leaves of it is lowered to that, and whether
    the engine tells of log-probabilities."""

    context_tokens: int
    clamp_max_tokens: bool = True
    logprobs: bool = True


class Rendered:
    """A validated request: what to generate from, and how its reply is read.

    `constraint` is what its tokens are chosen under, if anything.
    """

    def __init__(
        self, conversion: Conversion, prompt: Prompt, sampling: Sampling, constraint: Constraint | None = None
    ) -> None:
        self.model = conversion.model
        self.prompt = prompt
        self.sampling = sampling
        self.stream = conversion.request.stream
        self.constraint = constraint
        self._conversion = conversion

    def open_reader(
        self, reply_id: str, vocabulary: Vocabulary, *, folds: bool = True, live_usage: bool = False
    ) -> Reader:
        """The reader of this request's one reply, which will carry `reply_id`; see there for the rest."""
        return Reader(self._conversion, reply_id, vocabulary, folds=folds, live_usage=live_usage)


def render(
    protocol: Protocol, body: bytes, vocabulary: Vocabulary, limits: Limits, *, salt: str = "",
    masks: Masks | None = None,
) -> Rendered:  # fmt: skip
    """Validate, convert and encode `body`; `masks` are those of an engine that keeps to constraints.

    Raises `InvalidRequest` (what the library says of it), `ConversionRefused` (with its reply) or `UnsupportedFeature`.
    """
    conversion = read(CONVERT[protocol], body, vocabulary)
    request = conversion.request
    _refuse_unsupported(request, limits)
    _refuse_hopeless(conversion, vocabulary, limits)
    ids = conversion.encode(vocabulary)
    sampling = _resolve_sampling(conversion, len(ids), limits)
    prompt = Prompt(ids=tuple(ids), opens_in=_opening(conversion), salt=salt)
    constraint = find_constraint(request, prompt, masks, conversion.wishes)
    return Rendered(conversion, prompt, sampling, constraint)


def count_prompt(protocol: Protocol, body: bytes, vocabulary: Vocabulary) -> list[int]:
    """The ids that `body` renders to, whatever their number; raises as `render` does."""
    conversion = read(CONVERT[protocol], body, vocabulary)
    _refuse_pictures(conversion.request)
    return conversion.encode(vocabulary)


def _refuse_unsupported(request: ConversationRequest, limits: Limits) -> None:
    """Refuse what the library accepts and this server does not do; raises `UnsupportedFeature` naming it."""
    if request.inference_options.logprobs and not limits.logprobs:
        raise UnsupportedFeature("log-probabilities (`logprobs`) are not served by this engine", param="logprobs")
    _refuse_pictures(request)


def _refuse_pictures(request: ConversationRequest) -> None:
    """Refuse pictures anywhere in the conversation; raises `UnsupportedFeature`."""
    for message in request.conversation.messages:
        for source in message.image_sources:
            raise UnsupportedFeature(f"pictures are not served yet ({source.path.lstrip('.')})", param="messages")


def _refuse_hopeless(conversion: Conversion, vocabulary: Vocabulary, limits: Limits) -> None:
    """Refuse a prompt whose text alone shows that it cannot fit: encoding it would take minutes and gigabytes.

    Raises `ConversionRefused` as for any prompt that is too long; the count it names is the least that is possible.
    """
    least_tokens = conversion.count_characters(vocabulary) // vocabulary.longest_token
    if least_tokens > limits.context_tokens:
        _resolve_max_tokens(conversion.request, least_tokens, limits)


def _resolve_sampling(conversion: Conversion, prompt_tokens: int, limits: Limits) -> Sampling:
    """Every sampling value as a number; raises `ConversionRefused` if prompt and answer do not fit the context."""
    options, top_p = conversion.request.inference_options, conversion.top_p
    return Sampling(
        temperature=1.0 if options.temperature is None else options.temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=secrets.randbelow(_LARGEST_SEED) if options.seed is None else options.seed,
        max_tokens=_resolve_max_tokens(conversion.request, prompt_tokens, limits),
        logprobs=(options.top_logprobs or 0) if options.logprobs else None,
    )


def _resolve_max_tokens(request: ConversationRequest, prompt_tokens: int, limits: Limits) -> int:
    """How many tokens may be generated. Only a prompt that leaves room can be clamped for."""
    explicit, room = request.inference_options.max_tokens, limits.context_tokens - prompt_tokens
    if limits.clamp_max_tokens and explicit is not None and 0 < room < explicit:
        return room
    try:
        return request.resolve_max_tokens(prompt_tokens, limits.context_tokens)
    except deepseek_recipe.ConversionError as error:
        raise ConversionRefused(str(error), body=error.body) from error


def _opening(conversion: Conversion) -> Literal["reasoning", "content", "call"]:
    """Where the rendered prompt leaves off."""
    options = conversion.options
    if options.starts_in_tool_calls:
        return "call"
    stage = options.thinking_initial_stage
    return "reasoning" if stage is not None and stage.starts_in_reasoning() else "content"

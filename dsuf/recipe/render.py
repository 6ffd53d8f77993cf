"""A request body of either protocol -> prompt ids, resolved sampling, and the reader for the reply.

Everything here is CPU work without waiting: run it in a thread.
"""

import secrets
from typing import Literal

import deepseek_recipe
import msgspec
from deepseek_recipe import ChatCompletionRequest, ConversationRequest, MessagesRequest

from dsuf.errors import EngineFailed, InvalidRequest, UnsupportedFeature
from dsuf.recipe.constraints import find_constraint
from dsuf.recipe.masks import Masks
from dsuf.recipe.names import FOREIGN_PREFIX, conversion_options
from dsuf.recipe.reader import Reader
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Constraint, Prompt, Sampling

Protocol = Literal["chat", "messages"]

_NAME_LIMIT = 128  # characters of a name that is not in the table: it goes into replies and logs
_LARGEST_SEED = 2**63


class ConversionRefused(InvalidRequest):
    """The library refused the request. `body` is its reply, in the OpenAI form, ready to send."""

    def __init__(self, message: str, *, body: str) -> None:
        super().__init__(message)
        self.body = body


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
        self, protocol: Protocol, request: ConversationRequest, model: str, prompt: Prompt, sampling: Sampling,
        constraint: Constraint | None = None,
    ) -> None:  # fmt: skip
        self.protocol = protocol
        self.model = model
        self.prompt = prompt
        self.sampling = sampling
        self.stream = request.stream
        self.constraint = constraint
        self._request = request

    def open_reader(
        self, reply_id: str, vocabulary: Vocabulary, *, folds: bool = True, live_usage: bool = False
    ) -> Reader:
        """The reader of this request's one reply, which will carry `reply_id`; see there for the rest."""
        identity = (self.protocol, self._request, reply_id, self.model)
        return Reader(*identity, vocabulary, folds=folds, live_usage=live_usage)


def render(
    protocol: Protocol, body: bytes, vocabulary: Vocabulary, limits: Limits, *, salt: str = "",
    masks: Masks | None = None,
) -> Rendered:  # fmt: skip
    """Validate, convert and encode `body`; `masks` are those of an engine that keeps to constraints.

    Raises `InvalidRequest` (what the library says of it), `ConversionRefused` (with its reply) or `UnsupportedFeature`.
    """
    model, request = _convert(protocol, body, vocabulary)
    _refuse_unsupported(request, limits)
    _refuse_hopeless(request, vocabulary, limits)
    ids = _encode(request, vocabulary)
    sampling = _resolve_sampling(request, len(ids), limits)
    prompt = Prompt(ids=tuple(ids), opens_in=_opening(request), salt=salt)
    constraint = find_constraint(request, prompt.ids, prompt.opens_in, masks)
    return Rendered(protocol, request, model, prompt, sampling, constraint)


def count_prompt(protocol: Protocol, body: bytes, vocabulary: Vocabulary) -> list[int]:
    """The ids that `body` renders to, whatever their number; raises as `render` does."""
    _, request = _convert(protocol, body, vocabulary)
    _refuse_pictures(request)
    return _encode(request, vocabulary)


def _convert(protocol: Protocol, body: bytes, vocabulary: Vocabulary) -> tuple[str, ConversationRequest]:
    """The library's reading of `body`, with its two kinds of error made one."""
    try:
        incoming = ChatCompletionRequest(body) if protocol == "chat" else MessagesRequest(body)
        model = incoming.model
        foreign = protocol == "messages" and model.startswith(FOREIGN_PREFIX) and len(model) <= _NAME_LIMIT
        return model, incoming.convert(conversion_options(vocabulary.special_tokens, *([model] if foreign else [])))
    except deepseek_recipe.ConversionError as error:
        raise ConversionRefused(str(error), body=error.body) from error
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


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


def _refuse_hopeless(request: ConversationRequest, vocabulary: Vocabulary, limits: Limits) -> None:
    """Refuse a prompt whose text alone shows that it cannot fit: encoding it would take minutes and gigabytes.

    Raises `ConversionRefused` as for any prompt that is too long; the count it names is the least that is possible.
    """
    text = vocabulary.encoding.render_conversation(request.conversation).prompt
    least_tokens = len(text) // vocabulary.longest_token
    if least_tokens > limits.context_tokens:
        _resolve_max_tokens(request, least_tokens, limits)


def _encode(request: ConversationRequest, vocabulary: Vocabulary) -> list[int]:
    """The prompt's ids. Special tokens come from the renderer alone, never from the text of a message."""
    try:
        return vocabulary.encoding.encode(request.conversation)
    except RuntimeError as error:
        raise EngineFailed("the prompt could not be encoded") from error


def _resolve_sampling(request: ConversationRequest, prompt_tokens: int, limits: Limits) -> Sampling:
    """Every sampling value as a number; raises `ConversionRefused` if prompt and answer do not fit the context."""
    options = request.inference_options
    return Sampling(
        temperature=1.0 if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        seed=secrets.randbelow(_LARGEST_SEED) if options.seed is None else options.seed,
        max_tokens=_resolve_max_tokens(request, prompt_tokens, limits),
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


def _opening(request: ConversationRequest) -> Literal["reasoning", "content", "call"]:
    """Where the rendered prompt leaves off."""
    options = request.parsing_options
    if options.starts_in_tool_calls:
        return "call"
    stage = options.thinking_initial_stage
    return "reasoning" if stage is not None and stage.starts_in_reasoning() else "content"

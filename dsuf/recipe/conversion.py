"""A request body as the library reads it, with its two kinds of error made one."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import deepseek_recipe
import msgspec
from deepseek_recipe import (
    ChatCompletionChunkGenerator,
    ChatCompletionRequest,
    Conversation,
    ConversationRequest,
    MessagesRequest,
    ParsingOptions,
    ResponsesRequest,
)

from dsuf.errors import EngineFailed, InvalidRequest
from dsuf.recipe.forms import Form, MessagesForm, ResponsesForm
from dsuf.recipe.names import FOREIGN_PREFIX, conversion_options
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.recipe.wishes import Wishes, read_messages_wishes, read_wishes, relax

T = TypeVar("T")
Protocol = Literal["chat", "messages", "responses", "completions"]
Generate = Callable[[str], Any]
"""From the id of a reply to what the library writes its events with."""

Convert = Callable[[bytes, Vocabulary], "Conversion"]
"""From a body of a protocol to what is asked for; raises what the library raises."""

_LEAST: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}], "input": ""}
"""What a body needs, whatever its protocol."""
_SEARCHED_BYTES, _SEARCHED_FIELDS = 4 << 20, 64
"""In how much of a body the field at fault is looked for."""
_NAME_LIMIT = 128  # characters of a name that is not in the table: it goes into replies and logs


class ConversionRefused(InvalidRequest):
    """The library refused the request. `body` is its reply, in the OpenAI form, ready to send."""

    def __init__(self, message: str, *, body: str) -> None:
        super().__init__(message)
        self.body = body


class Conversion:
    """What the library made of a body: the conversation and its options, and how the one reply will be written.

    `wishes` are what the library does not pass on.
    """

    def __init__(
        self, model: str, request: ConversationRequest, form: Form, generate: Generate, wishes: Wishes | None = None
    ) -> None:
        self.model, self.request = model, request
        self.form, self.generate = form, generate
        self.wishes = wishes or Wishes()
        self._conversation = request.conversation
        if self.wishes.form is not None:
            self._conversation = with_form(request.conversation, self.wishes.form)

    @property
    def options(self) -> ParsingOptions:
        """How the reply is read."""
        return self.request.parsing_options

    @property
    def top_p(self) -> float | None:
        """The resolved `top_p`."""
        return self.request.inference_options.top_p

    def count_characters(self, vocabulary: Vocabulary) -> int:
        """Length of the prompt's text, which takes far less time to know than its ids."""
        return len(vocabulary.encoding.render_conversation(self._conversation).prompt)

    def encode(self, vocabulary: Vocabulary) -> list[int]:
        """The prompt's ids. Special tokens come from the renderer alone, never from the text of a message."""
        try:
            return vocabulary.encoding.encode(self._conversation)
        except RuntimeError as error:
            raise EngineFailed("the prompt could not be encoded") from error


def read(convert: Convert, body: bytes, vocabulary: Vocabulary) -> Conversion:
    """Have `convert` read `body`; raises `InvalidRequest` or `ConversionRefused`."""
    try:
        return convert(body, vocabulary)
    except deepseek_recipe.ConversionError as error:
        raise ConversionRefused(str(error), body=error.body) from error
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def parse(kind: Callable[[bytes], T], body: bytes) -> T:
    """`body` as the library's `kind` of request; raises `InvalidRequest` that names the field at fault, which the
    library does not tell: it is the one that fails by itself, too."""
    try:
        return kind(body)
    except ValueError as error:
        try:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if len(body) <= _SEARCHED_BYTES else {}
        except msgspec.ValidationError:
            raise InvalidRequest(f"the request body must be a JSON object ({error})") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            members = {}
        fields = itertools.islice(members.items(), _SEARCHED_FIELDS)
        name = next((name for name, value in fields if not _reads(kind, {**_LEAST, name: value})), None)
        raise InvalidRequest(str(error) if name is None else f"{error} (in `{name}`)", param=name) from error


def _reads(kind: Callable[[bytes], object], fields: Mapping[str, Any]) -> bool:
    """Whether the library takes a body of `fields`."""
    try:
        kind(msgspec.json.encode(fields))
    except ValueError:
        return False
    return True


def convert_chat(body: bytes, vocabulary: Vocabulary) -> Conversion:
    """Chat Completions."""
    incoming = parse(ChatCompletionRequest, relax(body))
    model = incoming.model
    request = incoming.convert(conversion_options(vocabulary.special_tokens, model))
    generate = partial(generate_chat, request, model)
    return Conversion(model, request, Form(), generate, wishes=read_wishes(body))


def convert_messages(body: bytes, vocabulary: Vocabulary) -> Conversion:
    """Messages. A name that begins as those of Messages clients do is an alias, if it is not overlong."""
    incoming = parse(MessagesRequest, body)
    model = incoming.model
    foreign = model.startswith(FOREIGN_PREFIX) and len(model) <= _NAME_LIMIT
    request = incoming.convert(conversion_options(vocabulary.special_tokens, model, foreign=foreign))

    def generate(reply_id: str) -> deepseek_recipe.MessagesChunkGenerator:
        return MessagesRequest.chunk_generator(request, reply_id, model)

    return Conversion(model, request, MessagesForm(), generate, wishes=read_messages_wishes(body))


def convert_responses(body: bytes, vocabulary: Vocabulary) -> Conversion:
    """Responses. What one repeats of its request is taken from it before conversion consumes it."""
    incoming = parse(ResponsesRequest, body)
    options = conversion_options(vocabulary.special_tokens, incoming.model)
    model, echo, tools = incoming.model, incoming.echo(), incoming.namespace_tool_map(options)
    relaxed = relax(body)
    request = (incoming if relaxed is body else ResponsesRequest(relaxed)).convert(options)

    def generate(reply_id: str) -> deepseek_recipe.ResponsesChunkGenerator:
        generator = ResponsesRequest.chunk_generator(request, reply_id, model)
        return generator.with_namespace_tool_map(tools).with_echo(echo)

    return Conversion(model, request, ResponsesForm(), generate, wishes=read_wishes(body))


def with_form(conversation: Conversation, schema: Mapping[str, Any]) -> Conversation:
    """`conversation` whose prompt tells the model the schema of the answer, as that of a chat does."""
    return Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_schema=schema,
    )


def generate_chat(request: ConversationRequest, model: str, reply_id: str) -> ChatCompletionChunkGenerator:
    """What writes the events of a chat."""
    return ChatCompletionRequest.chunk_generator(request, reply_id, model)

"""Routes that count, make and read tokens without generating any."""

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dsuf.api.body import read_body
from dsuf.api.openapi.server import DetokenizeRequest
from dsuf.api.ops import reply_json
from dsuf.api.parts import Parts
from dsuf.api.wire import read_chat, read_messages, read_responses
from dsuf.errors import InvalidRequest
from dsuf.recipe.names import SERVED_NAMES
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import Vocabulary

_Fields = TypeVar("_Fields", bound=msgspec.Struct)
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, rb"\\u[dD][89abAB]..", _LOW))


class TokenizeFields(msgspec.Struct):
    """A body of `/tokenize`: a raw `prompt`, or else what Chat Completions takes."""

    prompt: str | None = None
    messages: Any = msgspec.UNSET


async def count_tokens(request: web.Request, parts: Parts) -> web.Response:
    """The size of a Messages prompt, in that protocol's form."""
    reading = read_messages(await _read(request, parts))
    ids = await parts.convert(count_prompt, "messages", reading.body, parts.vocabulary)
    return reply_json({"input_tokens": len(ids)})


async def count_input(request: web.Request, parts: Parts) -> web.Response:
    """The size of a prompt of Responses, in that protocol's form."""
    reading = read_responses(await _read(request, parts))
    ids = await parts.convert(count_prompt, "responses", reading.body, parts.vocabulary)
    if reading.refusal is not None:
        raise reading.refusal
    return reply_json({"object": "response.input_tokens", "input_tokens": len(ids)})


async def tokenize(request: web.Request, parts: Parts) -> web.Response:
    """Ids of a raw prompt, in which special tokens are recognised, or of a rendered conversation."""
    body = await _read(request, parts)
    ids = await parts.convert(_tokenize, body, parts.vocabulary)
    return reply_json({"count": len(ids), "max_model_len": parts.settings.context_tokens, "tokens": ids})


async def detokenize(request: web.Request, parts: Parts) -> web.Response:
    """The text of ids, special tokens included."""
    body = await _read(request, parts)
    return reply_json({"prompt": await parts.convert(_detokenize, body, parts.vocabulary)})


async def _read(request: web.Request, parts: Parts) -> bytes:
    """The body, under the server's limits."""
    settings = parts.settings
    return await read_body(request, limit_bytes=settings.body_limit_bytes, timeout_s=settings.body_timeout_s)


def _tokenize(body: bytes, vocabulary: Vocabulary) -> list[int]:
    """Ids of what `body` holds; raises `InvalidRequest`."""
    fields = _decode(body, TokenizeFields)
    if fields.prompt is not None:
        return vocabulary.encode(fields.prompt)
    if fields.messages is msgspec.UNSET:
        raise InvalidRequest("`prompt` or `messages` is required")
    return count_prompt("chat", read_chat(_name_model(body)).body, vocabulary)


def _detokenize(body: bytes, vocabulary: Vocabulary) -> str:
    """The text of the ids in `body`; raises `InvalidRequest`."""
    tokens = _decode(body, DetokenizeRequest).tokens
    vocabulary.check(tokens, "tokens")
    return vocabulary.decode(tokens)


def _name_model(body: bytes) -> bytes:
    """`body` with a model name if it has none: there is only one tokenizer."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    return body if "model" in fields else msgspec.json.encode({"model": SERVED_NAMES[0], **fields})


def _decode(body: bytes, kind: type[_Fields]) -> _Fields:
    """`body` as a `kind`; raises `InvalidRequest`."""
    try:
        return msgspec.convert(msgspec.json.decode(body), kind)  # all of it is decoded: a skipped field may be damaged
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        lone = not isinstance(error, msgspec.ValidationError) and _LONE.search(body)
        reason = "a lone surrogate (half of a pair of \\u escapes)" if lone else str(error)
        raise InvalidRequest(f"invalid request body: {reason}") from error

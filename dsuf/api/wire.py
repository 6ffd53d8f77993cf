"""What the library does not read in a request body: two OpenAI spellings, and fields that must not be ignored."""

import re
from typing import Any

import msgspec

from dsuf.api.blocks import rewrite
from dsuf.errors import UnsupportedFeature

_PRIVATE = ("dsh_session_log", "dsh_plugin_packages")  # a session's event log, an inventory: nobody's business here
_PRIVATE_MARKS = tuple(f'"{name}"'.encode() for name in _PRIVATE)

# The role as it is usually spelt, or any role spelt with escapes, which has to be decoded to be known.
_DEVELOPER = re.compile(rb'"developer"|"role"\s*:\s*"[^"]*\\u')

_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""By this the SDK knows that it has to send the whole conversation, and does."""

_REFERENCE = re.compile(rb'"type"\s*:\s*"item_reference"')


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A body as the library gets it, the user its prefixes belong to, the priority as it was sent, whether each event
    of a stream shall tell the usage so far, and what to refuse once the rest is found valid."""

    body: bytes
    user: str = ""
    priority: Any = None
    live_usage: bool = False
    refusal: UnsupportedFeature | None = None


class _Fields(msgspec.Struct):
    """What is looked at; all else is skipped, not decoded: a body can hold megabytes that nobody asked for."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: Any = None
    max_completion_tokens: Any = None
    logit_bias: Any = None
    modalities: Any = None
    audio: Any = None
    user_id: Any = None
    metadata: Any = None
    priority: Any = None
    stream_options: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    thread: Any = None
    input: msgspec.Raw = msgspec.Raw(b"")


def read_chat(body: bytes) -> Reading:
    """Translate `developer` and `max_completion_tokens`; note extensions that change the answer and are not served.

    A body that is no JSON object is left to the library, which words the error.
    """
    body = _drop_private(body)
    fields = _look_at(body)
    return Reading(
        body=_rewrite(body, fields), user=_user(fields), priority=fields.priority, live_usage=_live_usage(fields),
        refusal=_find_refusal(fields),
    )  # fmt: skip


def read_messages(body: bytes) -> Reading:
    """Translate what the library would take for something else; raises `UnsupportedFeature` for a thread, at once: what
    continues one is no whole conversation, and its flaws would be told instead."""
    body = rewrite(_drop_private(body))
    fields = _look_at(body)
    if fields.thread is not None:
        raise UnsupportedFeature("`thread` is not served: no messages are kept", param="thread", details=_NO_THREAD)
    return Reading(body=body, user=_user(fields), priority=fields.priority)


def read_completion(body: bytes) -> Reading:
    """Note extensions that change the answer and are not served."""
    fields = _look_at(body)
    return Reading(
        body=body, user=_user(fields), priority=fields.priority, live_usage=_live_usage(fields),
        refusal=_find_refusal(fields),
    )  # fmt: skip


def read_responses(body: bytes) -> Reading:
    """Note what asks for something that an earlier request has left here, where nothing is left."""
    fields = _look_at(body)
    refusal = _find_state(fields) or _find_refusal(fields)
    return Reading(body=body, user=_user(fields), priority=fields.priority, refusal=refusal)


def _drop_private(body: bytes) -> bytes:
    """`body` without a client's private data, whose megabytes the library would read on the event loop's time."""
    if not any(name in body for name in _PRIVATE_MARKS):
        return body
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return msgspec.json.encode({name: value for name, value in members.items() if name not in _PRIVATE})


def _look_at(body: bytes) -> _Fields:
    """The fields of `body`; of something else than an object there are none."""
    try:
        return msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Fields()


def _rewrite(body: bytes, fields: _Fields) -> bytes:
    """`body` in the spelling that the library reads; the older name of `max_tokens` wins where both are there."""
    renames = _DEVELOPER.search(memoryview(fields.messages)) is not None
    copies = fields.max_completion_tokens is not None and fields.max_tokens is None
    if not (renames or copies):
        return body
    try:
        whole = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if copies:
        whole["max_tokens"] = fields.max_completion_tokens
    for message in _list(whole.get("messages")):
        if isinstance(message, dict) and message.get("role") == "developer":
            message["role"] = "system"
    return msgspec.json.encode(whole)


def _find_refusal(fields: _Fields) -> UnsupportedFeature | None:
    """A field that would silently give another answer than was asked for."""
    if fields.logit_bias:
        return UnsupportedFeature("`logit_bias` is not served", param="logit_bias")
    kinds = [fields.modalities] if isinstance(fields.modalities, str) else _list(fields.modalities)
    if fields.audio or any(kind != "text" for kind in kinds):
        return UnsupportedFeature("the only output modality served is text", param="modalities")
    return None


def _find_state(fields: _Fields) -> UnsupportedFeature | None:
    """A field of Responses that refers to something kept: ignoring it would answer without what it stands for."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(fields, name) is not None:
            return UnsupportedFeature(
                f"`{name}` is not served: no responses, conversations or prompts are kept", param=name
            )
    if fields.background:
        return UnsupportedFeature("`background` is not served: nothing goes on after the request", param="background")
    if _REFERENCE.search(memoryview(fields.input)) is not None:
        return UnsupportedFeature("`item_reference` is not served: no items are kept", param="input")
    return None


def _user(fields: _Fields) -> str:
    """The `user_id` that keeps a user's cached prefixes apart, or "". In Messages it is part of `metadata`."""
    inner = fields.metadata.get("user_id") if isinstance(fields.metadata, dict) else None
    return next((user for user in (fields.user_id, inner) if isinstance(user, str)), "")


def _live_usage(fields: _Fields) -> bool:
    """Whether the stream is asked to tell its usage all along, by the name that other servers gave that."""
    options = fields.stream_options
    return isinstance(options, dict) and options.get("continuous_usage_stats") is True


def _list(value: Any) -> list[Any]:
    """`value` if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []

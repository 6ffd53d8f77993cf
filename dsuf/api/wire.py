"""What the library does not read in a request body: two OpenAI spellings, and fields that must not be ignored."""

from collections.abc import Callable
from typing import Any

import msgspec

from dsuf.errors import UnsupportedFeature


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A body as the library gets it, the user its prefixes belong to, and what to refuse once it is found valid."""

    body: bytes
    user: str = ""
    refusal: UnsupportedFeature | None = None


def read_chat(body: bytes) -> Reading:
    """Translate `developer` and `max_completion_tokens`; note extensions that change the answer and are not served.

    A body that is no JSON object is left to the library, which words the error.
    """
    fields = _decode(body)
    if fields is None:
        return Reading(body=body)
    changed = [rewrite(fields) for rewrite in _REWRITES]
    return Reading(
        body=msgspec.json.encode(fields) if any(changed) else body,
        user=_user(fields),
        refusal=_find_refusal(fields),
    )


def read_messages(body: bytes) -> Reading:
    """Only the user is looked for; the library reads the rest."""
    return Reading(body=body, user=_user(_decode(body) or {}))


def _decode(body: bytes) -> dict[str, Any] | None:
    """`body` as an object, or None."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _rename_developer(fields: dict[str, Any]) -> bool:
    """OpenAI's newer name of the system role."""
    messages = _list(fields.get("messages"))
    found = [message for message in messages if isinstance(message, dict) and message.get("role") == "developer"]
    for message in found:
        message["role"] = "system"
    return bool(found)


def _copy_max_tokens(fields: dict[str, Any]) -> bool:
    """OpenAI's newer name of `max_tokens`, which yields to the older one."""
    newer = fields.get("max_completion_tokens")
    if newer is None or fields.get("max_tokens") is not None:
        return False
    fields["max_tokens"] = newer
    return True


_REWRITES: tuple[Callable[[dict[str, Any]], bool], ...] = (_rename_developer, _copy_max_tokens)


def _find_refusal(fields: dict[str, Any]) -> UnsupportedFeature | None:
    """A field that would silently give another answer than was asked for."""
    if fields.get("logit_bias"):
        return UnsupportedFeature("`logit_bias` is not served", param="logit_bias")
    if fields.get("audio") or any(kind != "text" for kind in _list(fields.get("modalities"))):
        return UnsupportedFeature("the only output modality served is text", param="modalities")
    return None


def _user(fields: dict[str, Any]) -> str:
    """The `user_id` that keeps a user's cached prefixes apart, or ""."""
    user = fields.get("user_id")
    return user if isinstance(user, str) else ""


def _list(value: Any) -> list[Any]:
    """`value` if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []

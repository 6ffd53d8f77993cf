"""Keys: which tenant a request belongs to."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

from dsuf.errors import AuthenticationFailed

_NAME_CHARACTERS = 12


def authenticate(headers: Mapping[str, str], keys: Iterable[str], *, kind: str = "API key") -> str:
    """The tenant that the request's key stands for, "" where no key is asked for; raises `AuthenticationFailed`.

    `Authorization: Bearer` wins over `x-api-key`. A tenant's name is derived from its key and does not reveal it.
    """
    known = [_to_bytes(key) for key in keys]
    if not known:
        return ""
    sent = _to_bytes(_sent_key(headers))
    matches = [hmac.compare_digest(sent, key) for key in known]  # all are compared, so that time tells nothing
    if not any(matches):
        raise AuthenticationFailed(f"a valid {kind} is required (Authorization: Bearer, or x-api-key)")
    return hashlib.sha256(sent).hexdigest()[:_NAME_CHARACTERS]


def authenticate_admin(headers: Mapping[str, str], admin_keys: Sequence[str], *, open_to_all: bool) -> None:
    """Raise `AuthenticationFailed` unless the request carries an admin key, or there is none and none of any kind."""
    if admin_keys:
        authenticate(headers, admin_keys, kind="admin key")
    elif not open_to_all:
        raise AuthenticationFailed("this needs an admin key, and the server has none")


def make_salt(tenant: str, user: str) -> str:
    """What keeps the cached prefixes of a tenant's user apart from others'; "" where neither is known."""
    return hashlib.sha256(f"{tenant}\0{user}".encode("utf-8", "surrogatepass")).hexdigest() if tenant or user else ""


def _sent_key(headers: Mapping[str, str]) -> str:
    """The key in `headers`, or ""."""
    scheme, _, credential = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credential.strip()
    return headers.get("x-api-key", "")


def _to_bytes(key: str) -> bytes:
    """A key as bytes; a header may hold bytes that are not UTF-8."""
    return key.encode("utf-8", "surrogateescape")

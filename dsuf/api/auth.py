"""Keys: which tenant a request belongs to."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

from dsuf.errors import AuthenticationFailed, PermissionDenied

_NAME_CHARACTERS = 12


def authenticate(headers: Mapping[str, str], keys: Sequence[str]) -> str:
    """The tenant that the request's key stands for, "" where no key is asked for; raises `AuthenticationFailed`.

    `Authorization: Bearer` wins over `x-api-key`. A tenant's name is derived from its key and does not reveal it.
    """
    if not keys:
        return ""
    if not _is_one_of(headers, keys):
        raise AuthenticationFailed("a valid API key is required (Authorization: Bearer, or x-api-key)")
    return hashlib.sha256(_to_bytes(_sent_key(headers))).hexdigest()[:_NAME_CHARACTERS]


def authenticate_admin(headers: Mapping[str, str], admin_keys: Sequence[str], keys: Sequence[str]) -> None:
    """Raise unless the request carries one of `admin_keys`, or there are no keys of any kind.

    `PermissionDenied` for one of `keys`, which allow everything else; `AuthenticationFailed` for none that is known.
    """
    if not (admin_keys or keys) or _is_one_of(headers, admin_keys):
        return
    if _is_one_of(headers, keys):
        raise PermissionDenied("this needs an admin key" if admin_keys else "this needs an admin key; there is none")
    raise AuthenticationFailed("a valid admin key is required (Authorization: Bearer, or x-api-key)")


def make_salt(tenant: str, user: str) -> str:
    """What keeps the cached prefixes of a tenant's user apart from others'; "" where neither is known."""
    return hashlib.sha256(f"{tenant}\0{user}".encode("utf-8", "surrogatepass")).hexdigest() if tenant or user else ""


def _sent_key(headers: Mapping[str, str]) -> str:
    """The key in `headers`, or ""."""
    scheme, _, credential = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credential.strip()
    return headers.get("x-api-key", "")


def _is_one_of(headers: Mapping[str, str], keys: Iterable[str]) -> bool:
    """Whether the key in `headers` is one of `keys`."""
    sent = _to_bytes(_sent_key(headers))
    matches = [hmac.compare_digest(sent, _to_bytes(key)) for key in keys]  # of all, so that time tells nothing
    return any(matches)


def _to_bytes(key: str) -> bytes:
    """A key as bytes; a header may hold bytes that are not UTF-8."""
    return key.encode("utf-8", "surrogateescape")

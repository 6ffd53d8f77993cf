"""The keys that open this server: whose they are, what each may do, and which one a request carries.

A key file has a key a line, and behind it what is said of it: `sk-… tenant=NAME concurrent=N per_minute=N`. Keys of one
tenant share its cached prefixes and its share of the engine; bounds are those of the single key. `#` begins a comment.
"""

import hashlib
import hmac
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dsuf.errors import AuthenticationFailed, CommandError, PermissionDenied

_NAME_CHARACTERS = 12
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key, its tenant, how many requests may be under way with it and how many it may begin a minute (0: no bound).

    Without a name of its own a tenant is called after the key, in a way that does not reveal it.
    """

    text: str
    tenant: str = ""
    concurrent: Annotated[int, Meta(ge=0)] = 0
    per_minute: Annotated[int, Meta(ge=0)] = 0

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.tenant or hashlib.sha256(_to_bytes(self.text)).hexdigest()[:_NAME_CHARACTERS]


class Keyring:
    """All keys; `replace` changes them while the server runs. Without any, of either kind, everybody may do everything.

    `admin_keys` allow what concerns everybody (dropping the prefix cache) and nothing else.
    """

    def __init__(self, keys: Sequence[Key] = (), admin_keys: Sequence[str] = ()) -> None:
        self._keys, self._admin_keys = tuple(keys), tuple(admin_keys)

    @property
    def asked(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """From now on these are the keys; what runs goes on."""
        self._keys = tuple(keys)

    def authenticate(self, headers: Mapping[str, str]) -> Key | None:
        """The key that the request carries, None where none is asked for; raises `AuthenticationFailed`, or
        `PermissionDenied` for an admin key.

        `Authorization: Bearer` wins over `x-api-key`.
        """
        if not self._keys:
            return None
        found = _find(headers, [key.text for key in self._keys])
        if found is None and _find(headers, self._admin_keys) is not None:
            raise PermissionDenied("this needs an API key: an admin key is for what concerns everybody alone")
        if found is None:
            raise AuthenticationFailed("a valid API key is required (Authorization: Bearer, or x-api-key)")
        return self._keys[found]

    def authenticate_admin(self, headers: Mapping[str, str]) -> None:
        """Raise unless the request carries an admin key, or there are no keys of any kind.

        `PermissionDenied` for a key that allows everything else; `AuthenticationFailed` for none that is known.
        """
        if not (self._admin_keys or self._keys) or _find(headers, self._admin_keys) is not None:
            return
        if _find(headers, [key.text for key in self._keys]) is not None:
            missing = "" if self._admin_keys else "; there is none"
            raise PermissionDenied(f"this needs an admin key{missing}")
        raise AuthenticationFailed("a valid admin key is required (Authorization: Bearer, or x-api-key)")


def gather_keys(listed: Iterable[str], path: Path | None, bounds: Key) -> list[Key]:
    """The keys of a list and of a file, each once; what the file does not say of one is as in `bounds`. The file's word
    on a key goes before the list's. Raises `CommandError` that names file and line, never the key."""
    filed = {key.text: key for key in (_read_file(path, bounds) if path is not None else [])}
    plain = {text: msgspec.structs.replace(bounds, text=text) for text in listed}
    return list((plain | filed).values())


def make_salt(tenant: str, user: str) -> str:
    """What keeps the cached prefixes of a tenant's user apart from others'; "" where neither is known."""
    return hashlib.sha256(f"{tenant}\0{user}".encode("utf-8", "surrogatepass")).hexdigest() if tenant or user else ""


def _read_file(path: Path, bounds: Key) -> list[Key]:
    """The keys of a file; it must hold one, since an emptied file shall not open a server."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"api_key_file = {str(path)!r}: cannot be read: {error}") from error
    split = [(number, list(itertools.takewhile(_is_said, line.split()))) for number, line in enumerate(lines, 1)]
    keys = [_read_line(f"{path}, line {number}", words, bounds) for number, words in split if words]
    if not keys:
        raise CommandError(f"api_key_file = {str(path)!r}: holds no key")
    return keys


def _is_said(word: str) -> bool:
    """Whether no comment begins with `word`."""
    return not word.startswith("#")


def _read_line(place: str, words: Sequence[str], bounds: Key) -> Key:
    """A key and what is said of it."""
    text, *said = words
    fields = dict(word.partition("=")[::2] for word in said)
    if strange := fields.keys() - {"tenant", "concurrent", "per_minute"}:
        raise CommandError(f"{place}: {min(strange)!r} is neither tenant=, concurrent= nor per_minute=")
    if "tenant" in fields and not _TENANT.fullmatch(fields["tenant"]):
        raise CommandError(f"{place}: tenant={fields['tenant']!r}: 1 to 64 letters, digits, '.', '_' and '-' alone")
    try:
        return msgspec.convert({**msgspec.structs.asdict(bounds), "text": text, **fields}, Key, strict=False)
    except msgspec.ValidationError as error:
        raise CommandError(f"{place}: concurrent and per_minute are whole numbers from 0") from error


def _find(headers: Mapping[str, str], texts: Sequence[str]) -> int | None:
    """Which of `texts` is the key in `headers`. All are compared, so that time tells nothing."""
    sent = _to_bytes(_sent_key(headers))
    matches = [hmac.compare_digest(sent, _to_bytes(text)) for text in texts]
    return matches.index(True) if any(matches) else None


def _sent_key(headers: Mapping[str, str]) -> str:
    """The key in `headers`, or ""."""
    scheme, _, credential = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credential.strip()
    return headers.get("x-api-key", "")


def _to_bytes(text: str) -> bytes:
    """A key as bytes; a header may hold bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")

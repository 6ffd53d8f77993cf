"""Where Redis is: the URL that a node is given, taken apart and checked.

    redis://[user[:password]@]host[:port][/database]
    redis+sentinel://[user[:password]@]host[:port],host[:port].../service[/database]
    redis+cluster://[user[:password]@]host[:port],host[:port]...

`rediss`, `rediss+sentinel` and `rediss+cluster` are the same over TLS. User and password may be percent-encoded.
Options follow `?`: `ca_file`, `cert_file`, `key_file`, `check_host` (yes or no), `sentinel_user`, `sentinel_password`.
"""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote

import msgspec

from dsuf.errors import CommandError

Kind = Literal["single", "sentinel", "cluster"]

_PORTS: dict[Kind, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_SCHEMES: dict[str, Kind] = {"redis": "single", "redis+sentinel": "sentinel", "redis+cluster": "cluster"}
_OPTIONS = ("ca_file", "cert_file", "key_file", "check_host", "sentinel_user", "sentinel_password")
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis server, the Sentinels that know where it is, or some nodes of a cluster; and what it takes to get in.

    Everything of the fleet is under `prefix`. `shown` is the URL without secrets.
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    shown: str
    prefix: str = "dsuf"
    tls: bool = False
    user: str | None = None
    password: str | None = None
    database: int = 0
    service: str = ""
    sentinel_user: str | None = None
    sentinel_password: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    check_host: bool = True


def parse_address(
    url: str, *, password: str = "", ca_file: Path | None = None, prefix: str = "dsuf"
) -> RedisAddress:  # fmt: skip
    """The parts of `url`; `password` and `ca_file` count where it has none. Raises `CommandError`, without secrets."""
    scheme, _, rest = url.partition("://")
    kind = _SCHEMES.get(scheme.replace("rediss", "redis", 1))
    if kind is None or not rest:
        raise CommandError(f"redis_url: expected {', '.join(f'{s}://' for s in _SCHEMES)}, or rediss for TLS")
    if not _PREFIX.fullmatch(prefix):
        raise CommandError(f"redis_prefix = {prefix!r}: expected up to 64 letters, digits, and . _ : -")
    # Not by the standard library, whose idea of several hosts with brackets differs from version to version.
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    if "@" in path or any("@" in text for text in query.split("&") if text.partition("=")[0] not in _OPTIONS):
        raise CommandError("redis_url: '/', '?' and '%' of a user or password are written %2F, %3F and %25")
    login, _, places = netloc.rpartition("@")
    user, _, secret = login.partition(":")
    options = _read_options(query)
    service, database = _read_path(kind, path)
    tls = scheme.startswith("rediss")
    address = RedisAddress(
        kind=kind, hosts=tuple(_read_host(place, _PORTS[kind]) for place in places.split(",")),
        shown=f"{scheme}://{places}{slash}{path}", prefix=prefix, tls=tls, user=unquote(user) or None,
        password=unquote(secret) or password or None, database=database, service=service,
        sentinel_user=options.get("sentinel_user"), sentinel_password=options.get("sentinel_password"),
        ca_file=options.get("ca_file") or (str(ca_file) if ca_file and tls else None),
        cert_file=options.get("cert_file"), key_file=options.get("key_file"),
        check_host=options.get("check_host", "yes") == "yes",
    )  # fmt: skip
    _check(address)
    return address


def _read_options(query: str) -> Mapping[str, str]:
    """What stands behind the question mark."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            raise CommandError(f"redis_url: unknown option {name!r}; there are {', '.join(_OPTIONS)}")
    if options.get("check_host", "yes") not in ("yes", "no"):
        raise CommandError("redis_url: check_host is yes or no")
    return options


def _read_path(kind: Kind, path: str) -> tuple[str, int]:
    """The service, for Sentinels, and the database."""
    names = [unquote(name) for name in path.split("/") if name]
    service = names.pop(0) if kind == "sentinel" and names else ""
    if kind == "sentinel" and not service:
        raise CommandError("redis_url: Sentinels need the name of the service: redis+sentinel://host/service")
    if len(names) > 1 or not all(name.isascii() and name.isdigit() for name in names):
        raise CommandError(f"redis_url: expected a database number, got {'/'.join(names)!r}")
    if names and kind == "cluster":
        raise CommandError("redis_url: a cluster has no databases")
    return service, int(names[0]) if names else 0


def _read_host(place: str, port: int) -> tuple[str, int]:
    """A host and its port; IPv6 addresses stand in brackets."""
    match = re.fullmatch(r"(?:\[([0-9A-Za-z:.%_-]+)\]|([^\[\]:\s]+))(?::([0-9]{1,5}))?", place)
    if match is None or not 0 < int(match[3] or port) < 65536:
        raise CommandError(f"redis_url: expected host or host:port, got {place!r}")
    return match[1] or match[2], int(match[3] or port)


def _check(address: RedisAddress) -> None:
    """What fits together."""
    if address.kind == "single" and len(address.hosts) > 1:
        raise CommandError("redis_url: several hosts need redis+sentinel:// or redis+cluster://")
    files = {name: getattr(address, name) for name in ("ca_file", "cert_file", "key_file") if getattr(address, name)}
    if files and not address.tls:
        raise CommandError(f"redis_url: {', '.join(files)} needs a URL with rediss")
    for name, path in files.items():
        if not Path(path).is_file():
            raise CommandError(f"redis_url: {name} = {path!r}: no such file")
    if files:
        _try_files(address)
    if address.user and not address.password:
        raise CommandError("redis_url: a user without a password")


def _try_files(address: RedisAddress) -> None:
    """Whether TLS can be spoken with these files; better found out now than with every connection."""
    if address.key_file and not address.cert_file:
        raise CommandError("redis_url: key_file needs a cert_file")
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
        if address.cert_file:
            context.load_cert_chain(address.cert_file, address.key_file, password="")  # nobody is asked for one
    except OSError as error:  # what `ssl` raises is one
        names = ", ".join(name for name in ("ca_file", "cert_file", "key_file") if getattr(address, name))
        raise CommandError(f"redis_url: {names}: cannot be used: {error}") from error

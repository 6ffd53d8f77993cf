"""Every setting of a node: one struct, read from `dsuf.toml` < environment `DSUF_…` < flags, and checked once.

The struct is the only list: flags, environment names, help and the printed configuration are derived from it. A setting
`queue_limit` is the key `queue_limit` in the file, `DSUF_QUEUE_LIMIT` in the environment and `--queue-limit` as a flag.
"""

import argparse
import difflib
import json
import math
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsuf.errors import CommandError

REDACTED = "[redacted]"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one node, resolved. Times are seconds, sizes bytes or tokens, as the names say."""

    host: Annotated[str, Meta(description="address to listen on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(description="HTTP port; 0 lets the system choose", ge=0, le=65535)] = 8000
    node_id: Annotated[
        str, Meta(description="this node's name in a fleet, kept over restarts; default: host and port", max_length=64)
    ] = ""
    control_host: Annotated[str, Meta(description="address on which other nodes are let in", min_length=1)] = (
        "127.0.0.1"
    )
    control_port: Annotated[int, Meta(description="port for other nodes; only open in a fleet", ge=0, le=65535)] = 8100
    advertise: Annotated[str, Meta(description="host:port that other nodes use; default: control_host and _port")] = ""
    redis_url: Annotated[
        str, Meta(description="directory of a fleet (redis, rediss, redis+sentinel, redis+cluster); none: one node")
    ] = ""
    redis_password_file: Annotated[Path | None, Meta(description="file with Redis' password")] = None
    redis_ca_file: Annotated[Path | None, Meta(description="certificates to trust for rediss")] = None
    redis_prefix: Annotated[str, Meta(description="what the fleet's keys in Redis begin with", min_length=1)] = "dsuf"
    peer_secret: Annotated[
        str, Meta(description="what a fleet's nodes know each other by, the same on each; 16 characters at least")
    ] = ""
    peer_secret_file: Annotated[Path | None, Meta(description="file with that secret")] = None
    peer_ca_file: Annotated[Path | None, Meta(description="certificates of the fleet, for TLS between its nodes")] = (
        None
    )
    peer_cert_file: Annotated[Path | None, Meta(description="this node's certificate for its peers")] = None
    peer_key_file: Annotated[Path | None, Meta(description="the key of that certificate")] = None
    transport: Annotated[
        Literal["auto", "tcp", "rdma"],
        Meta(description="how caches come from peers; auto: RDMA with those that have it; rdma: no start without"),
    ] = "auto"
    peer_patience: Annotated[
        float, Meta(description="wait for caches of peers so many times as long as computing takes", ge=0.1, le=100)
    ] = 1.0
    model: Annotated[Path | None, Meta(description="checkpoint directory; without one the shipped model")] = None
    engine: Annotated[
        Literal["auto", "reference", "scripted", "cuda"],
        Meta(description="what computes; auto takes the fastest that this machine has"),
    ] = "auto"
    script: Annotated[Path | None, Meta(description="script of the scripted engine (a testing tool)")] = None
    role: Annotated[Literal["both", "prefill", "decode"], Meta(description="what this node computes of a turn")] = (
        "both"
    )
    prefill: Annotated[
        Literal["replay", "exact"],
        Meta(description="replay: upper layers only see the end of a prompt, as the vendor deploys; exact: all of it"),
    ] = "replay"
    prefill_chunk_tokens: Annotated[
        int, Meta(description="prompt tokens a step at most; fewer where that would hold up running streams", ge=1)
    ] = 256
    decode_gap_s: Annotated[
        float, Meta(description="bound on the gap between a stream's tokens while prompts are computed", ge=0.01)
    ] = 0.5
    drafts: Annotated[int, Meta(description="draft tokens that a decode step verifies; 0: none", ge=0, le=16)] = 5
    draft_rule: Annotated[
        Literal["block", "token"],
        Meta(description="how drafts of a sampled reply are judged; both are exact, block keeps more"),
    ] = "block"
    draft_confidence: Annotated[
        float, Meta(description="verify no draft behind which the running confidence is below this", ge=0, le=1)
    ] = 0.0
    context_tokens: Annotated[int, Meta(description="longest prompt and answer together", ge=16, le=1_048_576)] = 65_536
    clamp_max_tokens: Annotated[
        bool, Meta(description="cut max_tokens to what is left of the context instead of refusing the request")
    ] = True
    max_turns: Annotated[int, Meta(description="turns that run at the same time", ge=1, le=4096)] = 8
    queue_limit: Annotated[int, Meta(description="turns that may wait; more get 429", ge=0, le=100_000)] = 64
    queue_timeout_s: Annotated[float, Meta(description="a turn that waited so long ends; 0: never", ge=0)] = 0.0
    turn_timeout_s: Annotated[float, Meta(description="a turn that took so long in all ends; 0: never", ge=0)] = 0.0
    device_cache_tokens: Annotated[
        int, Meta(description="positions that the engine's cache holds; 0: enough for max_turns whole contexts", ge=0)
    ] = 0
    device_bytes: Annotated[
        int, Meta(description="GPU memory for weights, caches and workspaces; 0: what is free, less a reserve", ge=0)
    ] = 0
    engram_on_host: Annotated[
        bool, Meta(description="keep the Engram tables in pinned host memory, where kernels read them in place")
    ] = False
    cache_bytes: Annotated[
        int, Meta(description="host memory for session caches that later turns take over; 0: none are kept", ge=0)
    ] = 1 << 30
    audit_share: Annotated[
        float,
        Meta(description="share of greedy turns with drafts that are computed again without, to compare", ge=0, le=1),
    ] = 0.01
    threads: Annotated[
        int, Meta(description="CPU threads of the reference engine; 0: all cores but one", ge=0, le=1024)
    ] = 0
    step_deadline_s: Annotated[float, Meta(description="a longer step makes the node not ready", ge=0.1)] = 60.0
    drain_s: Annotated[float, Meta(description="time that running streams get after SIGTERM", ge=0)] = 60.0
    keepalive_s: Annotated[
        float, Meta(description="comment on a silent stream this often; clients give up after 300 s", ge=0.05, le=300)
    ] = 15.0
    body_limit_bytes: Annotated[int, Meta(description="largest request body", ge=1024)] = 64 * 1024 * 1024
    body_timeout_s: Annotated[float, Meta(description="time for a request body to arrive", ge=0.1)] = 30.0
    write_timeout_s: Annotated[float, Meta(description="a client that takes nothing for so long has left", ge=0.1)] = (
        30.0
    )
    api_keys: Annotated[tuple[str, ...], Meta(description="accepted keys, comma separated; none: no check")] = ()
    api_key_file: Annotated[
        Path | None, Meta(description="file with a key a line, its tenant and bounds; read again when it changes")
    ] = None
    key_concurrent: Annotated[int, Meta(description="requests that a key may have under way; 0: any", ge=0)] = 0
    key_per_minute: Annotated[int, Meta(description="requests that a key may begin a minute; 0: any", ge=0)] = 0
    admin_keys: Annotated[
        tuple[str, ...], Meta(description="keys that may drop the prefix cache; none: only a server without keys may")
    ] = ()
    tls_cert_file: Annotated[Path | None, Meta(description="certificate (PEM, with its chain) to serve HTTPS with")] = (
        None
    )
    tls_key_file: Annotated[Path | None, Meta(description="the key of that certificate, without a passphrase")] = None
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="origins whose pages may use this server, comma separated; *: any; none: off")
    ] = ()
    otlp_endpoint: Annotated[
        str, Meta(description="where traces of turns go (OTLP over HTTP, the whole URL); none: no traces")
    ] = ""
    trace_share: Annotated[float, Meta(description="share of the turns that is traced", ge=0, le=1)] = 1.0
    record_dir: Annotated[
        Path | None,
        Meta(description="write token ids, seed and plans of each turn here, for `dsuf replay`; none: no"),
    ] = None
    cache_dir: Annotated[Path | None, Meta(description="for what can be made again; default: XDG cache")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level logged")] = "info"


_SECRET = {"api_keys", "admin_keys"}
_EXPECTED = re.compile(r"Expected `(\w+)`( [<>]=? [\d.]+| of length [<>]= \d+)?")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list"}
DEFAULT_FILE = Path("dsuf.toml")
_SECRET_TEXTS = {"peer_secret", "redis_url"}
"""Secrets of one text; of a URL the password alone is one."""
_URL_PASSWORD = re.compile(r"(?<=://)([^/@:]*):.*@")
"""Up to the last `@`, since a `/` or `?` in a password is a slip that should not show the rest of it."""
_URL_OPTION = re.compile(r"(?<=[?&]sentinel_password=)[^&]+")
_ADVERTISE = re.compile(r"(\[[0-9A-Za-z:.%_-]+\]|[^\s\[\]/@,]+):([0-9]{1,5})", re.ASCII)
_ANYWHERE = ("0.0.0.0", "::", "[::]")
_LEAST_SECRET = 16
_OTHERS = frozenset(
    f"DSUF_{name}"
    for name in (
        "BENCH_KEY", "CHECKPOINT", "COMMIT", "GOLDEN", "NODE", "NODES", "NO_SETUP", "PYTHON", "RDMA_IMAGE", "SM",
        "SYSTEM_PACKAGES", "TORCH_PYTHON",
    )
)  # fmt: skip
"""Variables that are no settings of a node: of commands, tests and deployment files."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of `Settings`: its name, its type with bounds, the bare type, its help text and its default."""

    name: str
    annotated: Any
    bare: Any
    help: str
    default: Any

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "DSUF_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words, where the setting is one of a few."""
        return typing.get_args(self.bare) if typing.get_origin(self.bare) is Literal else ()


def list_settings() -> list[Setting]:
    """All settings, in the order of the struct."""
    hints = typing.get_type_hints(Settings, include_extras=True)
    found = []
    for field in msgspec.structs.fields(Settings):
        if typing.get_origin(hints[field.name]) is not Annotated:
            continue
        bare, meta = typing.get_args(hints[field.name])
        found.append(Setting(name=field.name, annotated=hints[field.name], bare=bare,
                             help=meta.description, default=field.default))  # fmt: skip
    return found


def load_settings(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> Settings:
    """The settings out of all three sources; raises `CommandError` that names setting, value, source and reason.

    `flags` holds the flags that were given, by setting name; names that are no setting are ignored, and so are `DSUF_…`
    variables that resemble none. An unknown key in the file is an error, since nothing else can have meant it.
    """
    values: dict[str, Any] = {}
    settings = list_settings()
    for source, given in _sources(settings, flags or {}, environ or {}, toml_path):
        for setting in settings:
            if setting.name in given:
                values[setting.name] = _convert(setting, given[setting.name], source)
    loaded = Settings(**values)
    for problem in _problems(loaded):
        raise CommandError(problem)
    return loaded


def find_file() -> Path | None:
    """The settings file that is read where none is named: `dsuf.toml` here, if there is one."""
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for each setting; a flag that is not used leaves no attribute behind."""
    for setting in list_settings():
        shown = "" if setting.default in (None, (), "") else f" (default: {_plain(setting.default)})"
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if setting.bare is not bool:
            options = {"metavar": "{" + ",".join(setting.choices) + "}" if setting.choices else _metavar(setting)}
        text = f"{setting.help}{shown}".replace("%", "%%")
        parser.add_argument(setting.flag, dest=setting.name, default=argparse.SUPPRESS, help=text, **options)


def describe(settings: Settings) -> str:
    """`settings` as the text of a `dsuf.toml`, each with its help as a comment.

    A key has a placeholder, which is refused when the text is read: left out, it would open the server that reads it.
    """
    lines = []
    for setting in list_settings():
        value = getattr(settings, setting.name)
        lines.append(f"# {setting.help}")
        if setting.name in _SECRET and value:
            lines.append(f"# {len(value)} set and not shown: put the keys themselves here before this file is used")
            value = (REDACTED,) * len(value)
        elif setting.name in _SECRET_TEXTS:
            value = _redact(setting.name, value)
        lines += [f"# {setting.name} =" if value is None else f"{setting.name} = {_toml(value)}", ""]
    return "\n".join(lines)


def _sources(
    settings: Sequence[Setting], flags: Mapping[str, Any], environ: Mapping[str, str], toml_path: Path | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What each source gives, weakest first, with the source's name for messages."""
    if toml_path is not None:
        yield str(toml_path), _read_file(toml_path, [setting.name for setting in settings])
    _refuse_slips([setting.variable for setting in settings], environ)
    yield "environment", {s.name: environ[s.variable] for s in settings if s.variable in environ}
    yield "flag", flags


def _refuse_slips(known: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse a variable that resembles a setting's name; a system may set others that begin with `DSUF_`."""
    for name in sorted(environ.keys() - set(known) - _OTHERS):
        if name.startswith("DSUF_") and (near := difflib.get_close_matches(name, known, 1, cutoff=0.75)):
            raise CommandError(f"environment: unknown setting {name!r}; did you mean {near[0]!r}?")


def _read_file(path: Path, names: list[str]) -> dict[str, Any]:
    """The decoded settings file."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # what tomllib raises, and besides it what text and overlong numbers do
        raise CommandError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise CommandError(f"{path}: nested too deeply") from error
    for key in data.keys() - set(names):
        near = difflib.get_close_matches(key, names, 1)
        raise CommandError(f"{path}: unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return data


def _convert(setting: Setting, value: Any, source: str) -> Any:
    """`value` as the setting's type; numbers and truth values may come as text."""
    if typing.get_origin(setting.bare) is tuple and isinstance(value, str):
        value = value.split(",")
    try:
        converted = msgspec.convert(value, setting.annotated, strict=False, dec_hook=_decode_path)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise msgspec.ValidationError("Expected a finite number")
        return _strip(converted) if isinstance(converted, tuple) else converted
    except msgspec.ValidationError as error:
        shown = REDACTED if setting.name in _SECRET | _SECRET_TEXTS else repr(value)
        reason = f"expected one of {', '.join(setting.choices)}" if setting.choices else _explain(str(error))
        raise CommandError(f"{setting.name} = {shown} ({source}): {reason}") from error


def _strip(entries: Sequence[str]) -> tuple[str, ...]:
    """`entries` once each, without space around them; a blank one is a variable that nobody filled in, and must not
    open a server."""
    stripped = tuple(dict.fromkeys(entry.strip() for entry in entries))
    if "" in stripped:
        raise msgspec.ValidationError("an entry is empty; leave the setting out for none")
    return stripped


def _decode_path(kind: Any, value: Any) -> Path:
    """A path from text, with `~` expanded."""
    if not isinstance(value, str) or not value:
        raise msgspec.ValidationError("Expected a path")
    if "\0" in value:
        raise msgspec.ValidationError("Expected a path without NUL")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise msgspec.ValidationError(f"Home folder of {Path(value).parts[0]} is not known") from error


def _problems(s: Settings) -> Iterator[str]:
    """What single fields cannot say: combinations, and what is not built yet."""
    for name in sorted(_SECRET | _SECRET_TEXTS):
        if REDACTED in getattr(s, name):
            yield f"{name}: {REDACTED!r} is what --print-config shows in place of a key; put the key itself there"
    yield from _fleet_problems(s)
    yield from _http_problems(s)
    if s.engine == "scripted" and s.script is None:
        yield "script: engine 'scripted' needs a script file"
    if s.engine != "scripted" and s.script is not None:
        yield f"script = {str(s.script)!r}: only engine 'scripted' takes a script, not {s.engine!r}"
    if not s.host.isprintable() or " " in s.host:
        yield f"host = {s.host!r}: expected an address or a name"
    if s.model is not None and not os.path.isdir(s.model):  # unlike Path.is_dir never raises
        yield f"model = {str(s.model)!r}: no such directory"
    if s.script is not None and not os.path.isfile(s.script):
        yield f"script = {str(s.script)!r}: no such file"


def _http_problems(s: Settings) -> Iterator[str]:
    """What does not fit together of how clients are let in."""
    if (s.tls_cert_file is None) != (s.tls_key_file is None):
        yield "tls_cert_file, tls_key_file: HTTPS needs both"
    if s.otlp_endpoint and not re.fullmatch(r"https?://[^/\s]+/\S*", s.otlp_endpoint):
        yield f"otlp_endpoint = {s.otlp_endpoint!r}: expected a whole URL, as http://127.0.0.1:4318/v1/traces"
    if s.api_key_file is not None and not os.path.isfile(s.api_key_file):
        yield f"api_key_file = {str(s.api_key_file)!r}: no such file"
    for origin in s.cors_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            yield f"cors_origins: {origin!r} is no origin; expected scheme://host or scheme://host:port, without a path"


def _fleet_problems(s: Settings) -> Iterator[str]:
    """What does not fit together for a node among others."""
    if s.peer_secret and s.peer_secret_file is not None:
        yield "peer_secret: peer_secret_file gives it too; one of them is enough"
    if s.peer_secret and len(s.peer_secret) < _LEAST_SECRET:
        yield f"peer_secret: {len(s.peer_secret)} characters, at least {_LEAST_SECRET} are needed"
    if s.redis_url and not (s.peer_secret or s.peer_secret_file or s.peer_cert_file):
        yield "peer_secret: a fleet needs one (or peer_secret_file), or anybody could read its session caches"
    if s.transport == "rdma" and not s.redis_url:
        yield "transport = 'rdma': there are no peers without redis_url"
    if s.redis_url and s.role != "both" and not s.cache_bytes:
        yield f"cache_bytes = 0: with role = {s.role!r} prompts go from node to node through it, and need room there"
    tls = [file is not None for file in (s.peer_ca_file, s.peer_cert_file, s.peer_key_file)]
    if any(tls) and not all(tls):
        yield "peer_ca_file, peer_cert_file, peer_key_file: TLS between nodes needs all three"
    if s.advertise and ((found := _ADVERTISE.fullmatch(s.advertise)) is None or not 0 < int(found[2]) < 65536):
        yield f"advertise = {s.advertise!r}: expected host:port"
    if s.redis_url and (s.advertise.rpartition(":")[0] or s.control_host) in _ANYWHERE:
        yield f"advertise = {s.advertise!r}: expected the host:port under which peers reach this node, not any address"
    if s.node_id and not re.fullmatch(r"[A-Za-z0-9._-]+", s.node_id):
        yield f"node_id = {s.node_id!r}: letters, digits, '.', '_' and '-' alone"


def _redact(name: str, value: str) -> str:
    """`value` without what is secret of it, which is refused when the text is read."""
    if name == "redis_url":
        return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", _URL_OPTION.sub(REDACTED, value))
    return REDACTED if value else value


def _metavar(setting: Setting) -> str:
    """What stands for the value in help: the unit where the name ends in one."""
    if Path in (setting.bare, *typing.get_args(setting.bare)):
        return "DIR" if setting.name in {"model", "cache_dir", "record_dir"} else "FILE"
    units = {"_tokens": "TOKENS", "_s": "SECONDS", "_bytes": "BYTES"}
    return next((unit for end, unit in units.items() if setting.name.endswith(end)), setting.name.upper())


def _plain(value: Any) -> str:
    """A default as help shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _toml(value: Any) -> str:
    """A TOML value. TOML's basic strings are JSON strings for every text without U+007F."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _explain(text: str) -> str:
    """What msgspec says of a value, as the end of a sentence and in words for people."""
    found = _EXPECTED.match(text)
    if found is None:
        return text[:1].lower() + text[1:].replace("`", "")
    kind, bound = found.groups()
    if bound and bound.startswith(" of length"):
        most = bound.partition("<= ")[2]
        return f"expected {most} characters at most" if most else "expected something that is not empty"
    return f"expected {_KINDS.get(kind, kind)}{bound or ''}"

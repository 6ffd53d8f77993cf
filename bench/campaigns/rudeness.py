"""What a hostile or broken client puts on a connection: whole, cut, slow, oversized, pipelined, damaged.

`draw` makes one visit of chance alone, so that a seed repeats it.
"""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

MODEL = "deepseek-flash"
BODY_LIMIT_BYTES = 256 << 10
"""What the visited server is told to take."""
_HEAD = "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_POSTS = (
    "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize", "/flush_cache",
)  # fmt: skip
_GETS = ("/health", "/readyz", "/v1/models", "/v1/models/x", "/metrics", "/", "/openapi.json", "/nowhere")
_NAMES = (
    "stop", "seed", "temperature", "tools", "tool_choice", "thinking", "user_id", "metadata", "system",
    "stream_options", "response_format", "logprobs", "top_logprobs", "suffix", "echo", "priority", "n",
)  # fmt: skip
_ODD = (None, True, -1, 0, 2**63, 1e308, 0.5, "", "x", "\x00", "\ud83d", [], {}, [[]], [None], {"a": {}}, "9" * 400)


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces to send, a pause before each but the first, and how the client ends: it reads to the end, or it shuts its
    side, or leaves with FIN or RST. `kind` names what it is."""

    kind: str
    pieces: Sequence[bytes]
    pause_s: float = 0.0
    end: Literal["read", "shut", "fin", "rst"] = "read"


def draw(chance: random.Random) -> Visit:
    """One visit."""
    kinds = list(_KINDS)
    kind = chance.choices(kinds, [_KINDS[name][1] for name in kinds])[0]
    return _KINDS[kind][0](kind, chance)


def _body(chance: random.Random, path: str) -> dict[str, Any]:
    """A body that the route takes, small."""
    text = chance.choice(("hi", "Grüße 世界 🦉", "long " * chance.randint(1, 200)))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.randint(1, 8)}
    if path == "/v1/completions":
        body["prompt"] = text
    elif path == "/v1/responses":
        body = {"model": MODEL, "input": text}
    elif path == "/tokenize":
        body = {"prompt": text}
    elif path == "/detokenize":
        body = {"tokens": [chance.randint(0, 900) for _ in range(5)]}
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if path in _POSTS[:4] and chance.random() < 0.5:
        body["stream"] = True
    return body


def _request(path: str, body: bytes, *, close: bool = True, extra: str = "") -> bytes:
    """A whole request."""
    ending = "connection: close\r\n" if close else ""
    return (_HEAD.format(path=path) + f"{extra}{ending}content-length: {len(body)}\r\n\r\n").encode() + body


def _encode(body: Any) -> bytes:
    """A body as JSON; halves of surrogate pairs stay escapes."""
    return json.dumps(body).encode()


def _some(chance: random.Random, *, close: bool = True) -> bytes:
    """Some whole request that is right."""
    if chance.random() < 0.3:
        ending = "connection: close\r\n" if close else ""
        return f"GET {chance.choice(_GETS)} HTTP/1.1\r\nhost: x\r\n{ending}\r\n".encode()
    path = chance.choice(_POSTS)
    return _request(path, _encode(_body(chance, path)), close=close)


def _right(kind: str, chance: random.Random) -> Visit:
    return Visit(kind=kind, pieces=[_some(chance)])


def _cut(kind: str, chance: random.Random) -> Visit:
    """The client leaves in the midst of its request, or of the reply."""
    whole = _some(chance)
    part = whole[: chance.randint(0, len(whole))]
    return Visit(kind=kind, pieces=[part], end=chance.choice(("shut", "fin", "rst")))


def _slow(kind: str, chance: random.Random) -> Visit:
    """Byte groups with pauses."""
    whole = _some(chance)
    cuts = sorted(chance.sample(range(1, len(whole)), min(6, len(whole) - 1)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return Visit(kind=kind, pieces=pieces, pause_s=chance.choice((0.001, 0.01, 0.05)))


def _stalled(kind: str, chance: random.Random) -> Visit:
    """A body that never comes to its end: the server's patience has to."""
    path = chance.choice(_POSTS[:7])
    whole = _request(path, _encode(_body(chance, path)))
    return Visit(kind=kind, pieces=[whole[: -chance.randint(1, 9)]])


def _oversized(kind: str, chance: random.Random) -> Visit:
    """Too much of a body, in one of its framings, or of a head."""
    path = chance.choice(_POSTS)
    much = chance.choice((BODY_LIMIT_BYTES + 1, 2 * BODY_LIMIT_BYTES))
    way = chance.randrange(4)
    if way == 0:
        return Visit(kind=kind, pieces=[_request(path, b" " * much)])
    if way == 1:
        head = (_HEAD.format(path=path) + "transfer-encoding: chunked\r\nconnection: close\r\n\r\n").encode()
        return Visit(kind=kind, pieces=[head + b"%x\r\n%b\r\n0\r\n\r\n" % (much, b" " * much)])
    if way == 2:
        packed = gzip.compress(b" " * (64 * much), 1, mtime=0)
        return Visit(kind=kind, pieces=[_request(path, packed, extra="content-encoding: gzip\r\n")])
    return Visit(kind=kind, pieces=[_request(path, b"{}", extra=f"x-much: {'y' * chance.choice((9_000, 70_000))}\r\n")])


def _pipelined(kind: str, chance: random.Random) -> Visit:
    """Several requests in one piece, the last of which says that it is the last."""
    pieces = [_some(chance, close=False) for _ in range(chance.randint(1, 5))]
    return Visit(kind=kind, pieces=[b"".join(pieces) + _some(chance)])


def _damaged(kind: str, chance: random.Random) -> Visit:
    """Bytes of the body changed, added or left out; much of it is no UTF-8."""
    path = chance.choice(_POSTS)
    body = bytearray(_encode(_body(chance, path)))
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(body))
        body[place : place + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 3))
    return Visit(kind=kind, pieces=[_request(path, bytes(body))])


def _odd_values(kind: str, chance: random.Random) -> Visit:
    """Fields with values of other kinds, and fields that the route does not know."""
    path = chance.choice(_POSTS)
    body = _body(chance, path)
    for name in chance.sample((*body, *_NAMES), chance.randint(1, 3)):
        body[name] = chance.choice(_ODD)
    return Visit(kind=kind, pieces=[_request(path, _encode(body))])


def _nested(kind: str, chance: random.Random) -> Visit:
    """Deep JSON."""
    depth, path = chance.choice((100, 130, 1_000, 60_000)), chance.choice(_POSTS)
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
    deep = opening * depth + "1" + closing * depth
    body = deep if chance.random() < 0.3 else json.dumps(_body(chance, path))[:-1] + f',"messages":{deep}}}'
    return Visit(kind=kind, pieces=[_request(path, body.encode())])


def _broken_head(kind: str, chance: random.Random) -> Visit:
    """What is no HTTP, or could be read in two ways."""
    body, path = b'{"prompt":"x"}', "/tokenize"
    lines = (
        "content-length: 5\r\ncontent-length: 14\r\n", "content-length: 14\r\ntransfer-encoding: chunked\r\n",
        "content-length: -1\r\n", "content-length: 1e3\r\n", "transfer-encoding: gzip, chunked\r\n", "bad header\r\n",
        " folded: x\r\n", "x: \x00\r\n", "content-encoding: br\r\n", "transfer-encoding: chunked\r\n", "expect: x\r\n",
        "expect: 100-continue\r\ncontent-length: 14\r\n", "content-type: a/b\r\ncontent-length: 14\r\n",
        "connection: upgrade\r\nupgrade: h2c\r\n", f"content-length: {10**30}\r\n",
    )  # fmt: skip
    starts = ("POST {} HTTP/1.1", "POST {} HTTP/9.9", "POST {}", "P\xd6ST {} HTTP/1.1", "POST http://[ HTTP/1.1",
              "OPTIONS * HTTP/1.1", "CONNECT x:1 HTTP/1.1", "PUT {} HTTP/1.0", "POST /%zz%00 HTTP/1.1",
              "\r\n\r\nGET / HTTP/1.1")  # fmt: skip
    start = chance.choice(starts).format(path)
    if chance.random() < 0.2:
        return Visit(kind=kind, pieces=[chance.randbytes(chance.randint(1, 400)) + b"\r\n\r\n"], end="shut")
    head = f"{start}\r\nhost: x\r\nconnection: close\r\n{chance.choice(lines)}\r\n"
    return Visit(kind=kind, pieces=[head.encode("latin-1") + body], end="shut")


_KINDS: dict[str, tuple[Callable[[str, random.Random], Visit], float]] = {
    "right": (_right, 15), "cut": (_cut, 20), "slow": (_slow, 6), "stalled": (_stalled, 0.5),
    "oversized": (_oversized, 4), "pipelined": (_pipelined, 8), "damaged": (_damaged, 18),
    "odd_values": (_odd_values, 18), "nested": (_nested, 5), "broken_head": (_broken_head, 12),
}  # fmt: skip
"""How each kind is drawn, and how often among the others."""

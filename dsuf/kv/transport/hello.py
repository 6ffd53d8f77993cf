"""How two nodes prove to each other that they are of one fleet, before either reads anything else.

    dials: hello (name, boot, random, purpose) ->
                              <- hello (name, boot, random)
           proof, terms                        ->
                              <- proof, terms             or: refused, and why

A frame is a byte for its kind, two for the length of the rest, and at most `HELLO_BYTES`. A proof is the HMAC-SHA256,
under the fleet's secret, of the role, both hellos and the sender's terms, so it fits no other connection, time, node,
boot, version or direction. Terms are read only once the proof is right.
"""

import asyncio
import hmac
import secrets
import ssl
import struct
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from dsuf.errors import CommandError, PeerError, PeerLost
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.wire import PROTOCOL

HELLO_BYTES = 512
SECRET_BYTES = 16
"""Shortest secret that is taken: it can be guessed at leisure from one overheard proof."""

_HEAD = struct.Struct(">BH")
_HELLO, _PROOF, _REFUSED = 0xD5, 0xD6, 0xD7
_MAC_BYTES = 32

T = TypeVar("T")
Purpose = Literal["control", "data"]


class Credentials(NamedTuple):
    """What shows that a node is of the fleet: the secret, or (or both) certificates, in the contexts for the side that
    is `called` and the side that `calls`. Both contexts verify the other side."""

    secret: bytes = b""
    called: ssl.SSLContext | None = None
    calls: ssl.SSLContext | None = None

    def check(self) -> None:
        """Raise `CommandError` where they would let strangers in."""
        if not self.secret and self.called is None:
            raise CommandError("peer_secret: a fleet needs a secret or certificates")
        if self.secret and len(self.secret) < SECRET_BYTES:
            raise CommandError(f"peer_secret: at least {SECRET_BYTES} bytes")
        for context in (self.called, self.calls):
            if context is not None and context.verify_mode != ssl.CERT_REQUIRED:
                raise CommandError("peer certificates: both sides have to be verified")


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What two nodes must know of each other: whose caches they can use, and how bytes can come over."""

    fingerprint: Annotated[str, msgspec.Meta(max_length=128)]
    fabric: Annotated[bytes, msgspec.Meta(max_length=256)] = b""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks, in which version of the protocol, with a fresh random `nonce`."""

    protocol: int
    node: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    purpose: Purpose = "control"

    @property
    def name(self) -> NodeName:
        """The node."""
        return NodeName(self.node, self.boot)


class Stream(NamedTuple):
    """Both directions of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def call(
    stream: Stream, me: NodeName, other: NodeName, purpose: Purpose, terms: Terms, credentials: Credentials
) -> Terms:  # fmt: skip
    """Prove oneself to `other`, whom this node has dialled, and have it prove itself; its terms.

    Raises `PeerLost` where it has been started again; `PeerError` where it is not of this fleet, or another node
    answers, as where nodes tell an address that means each reader's own machine.
    """
    ours = msgspec.msgpack.encode(Hello(PROTOCOL, me.node, me.boot, secrets.token_bytes(32), purpose))
    _send(stream, _HELLO, ours)
    theirs = await _receive(stream, _HELLO)
    hello = _read_hello(theirs, stream, credentials)
    if hello.name != other:
        if hello.node != other.node:
            raise PeerError(
                f"{hello.node} answers where {other.node} says it is: has {other.node} the right advertise?"
            )
        raise PeerLost(f"{other.node} is not there any more, {hello.node} answers anew")
    _prove(stream, b"calls", ours + theirs, terms, credentials)
    return await _verify(stream, b"called", ours + theirs, credentials)


async def answer(
    stream: Stream, me: NodeName, terms: Terms, credentials: Credentials
) -> tuple[NodeName, Purpose, Terms]:  # fmt: skip
    """Have whoever has dialled prove itself, and prove oneself to it: who it is, for what, and its terms.

    Raises `PeerError`. The caller sets the deadline.
    """
    theirs = await _receive(stream, _HELLO)
    hello = _read_hello(theirs, stream, credentials)
    ours = msgspec.msgpack.encode(Hello(PROTOCOL, me.node, me.boot, secrets.token_bytes(32), hello.purpose))
    _send(stream, _HELLO, ours)
    try:
        other = await _verify(stream, b"calls", theirs + ours, credentials)
        if hello.node == me.node:
            raise PeerError(f"two nodes are called {me.node}, or one calls itself")
        if other.fingerprint != terms.fingerprint:
            raise PeerError("another model, or other formats")
    except PeerError as error:
        _send(stream, _REFUSED, str(error).encode()[:HELLO_BYTES])
        raise
    _prove(stream, b"called", theirs + ours, terms, credentials)
    return hello.name, hello.purpose, other


def _prove(stream: Stream, role: bytes, said: bytes, terms: Terms, credentials: Credentials) -> None:
    """Send the proof of this side, and its terms."""
    body = msgspec.msgpack.encode(terms)
    _send(stream, _PROOF, _sign(credentials.secret, role, said, body) + body)


async def _verify(stream: Stream, role: bytes, said: bytes, credentials: Credentials) -> Terms:
    """The terms of the other side, once its proof is right; raises `PeerError`."""
    proof = await _receive(stream, _PROOF)
    mac, body = proof[:_MAC_BYTES], proof[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _sign(credentials.secret, role, said, body)):
        raise PeerError("the proof is wrong: another secret?")
    return _decode(body, Terms)


def _sign(secret: bytes, role: bytes, said: bytes, terms: bytes) -> bytes:
    """The proof. Each part has its length before it, so that none can pass as part of another."""
    parts = b"".join(len(part).to_bytes(4, "big") + part for part in (b"dsuf peer", role, said, terms))
    return hmac.digest(secret, parts, "sha256")


def _send(stream: Stream, kind: int, body: bytes) -> None:
    """Queue one frame."""
    stream.writer.write(_HEAD.pack(kind, len(body)) + body)


async def _receive(stream: Stream, kind: int) -> bytes:
    """The rest of the next frame, which must be of `kind`; raises `PeerError`, `PeerLost` where there is none."""
    try:
        found, size = _HEAD.unpack(await stream.reader.readexactly(_HEAD.size))
        if size > HELLO_BYTES or found not in (kind, _REFUSED):
            raise PeerError("it does not speak the protocol of peers")
        body = await stream.reader.readexactly(size)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise PeerLost("it hung up before it had proved itself") from error
    if found == _REFUSED:
        raise PeerError(f"refused: {body.decode(errors='replace')}")
    return body


def _read_hello(frame: bytes, stream: Stream, credentials: Credentials) -> Hello:
    """The hello in `frame`; raises `PeerError` for another version, or a name that is not that of the certificate."""
    hello = _decode(frame, Hello)
    if hello.protocol != PROTOCOL:
        _send(stream, _REFUSED, f"version {PROTOCOL} is spoken here".encode())
        raise PeerError(f"it speaks version {hello.protocol} of the protocol of peers, not {PROTOCOL}")
    secure: Any = stream.writer.get_extra_info("ssl_object")
    if not credentials.secret and (secure is None or hello.node not in _certified(secure.getpeercert())):
        raise PeerError(f"the certificate is not that of {hello.node}")
    return hello


def _certified(certificate: Any) -> set[str]:
    """The names in a verified certificate."""
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return {*subject, *(value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")}


def _decode(frame: bytes, kind: type[T]) -> T:
    """One small struct; raises `PeerError`."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError("it does not speak the protocol of peers") from error

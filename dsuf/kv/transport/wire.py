"""What goes over a control connection: frames of a length and a message in msgpack, and what the messages say."""

import struct
from itertools import chain
from typing import Protocol

import msgspec
import numpy as np

from dsuf.errors import PeerError
from dsuf.kv.handoff import WAIT_S, Offer
from dsuf.kv.trace import Trace, make_trace
from dsuf.kv.transport.queue_pair import QueuePairEnd, RemoteMemory
from dsuf.types import CacheLayout, Turn

PROTOCOL = 1
FRAME_BYTES = 16 << 20
"""Largest frame: the prompt of a turn takes 4 bytes a token, pictures and slices of pages come on top."""
LENGTH = struct.Struct(">I")

_PIECE_TOKENS = 16_384


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A turn as it travels: `ids` are the prompt's tokens, 4 bytes each, little-endian; `rest` the turn without;
    `links` the digests of its whole pages, where they are known."""

    ids: bytes
    rest: Turn
    links: bytes = b""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """`Giver.offer` for `turn`; the first time on a connection with its `order`. Answered by `Offered`."""

    turn: str
    pages: int
    compute: bool
    order: Order | None = None
    patience_s: float = WAIT_S


class Offered(msgspec.Struct, frozen=True, array_like=True, tag="offered"):
    """The offer, or that no more is to come."""

    offer: Offer | None


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """`Giver.release` of an offer by its number. Answered by `Done`: whether it was good until now."""

    offer: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """`Giver.leave` of a turn. Answered by `Done`."""

    turn: str


class Invite(msgspec.Struct, frozen=True, array_like=True, tag="invite"):
    """Take what the sender keeps of this prompt, since it is about to go. Answered by `Done`: whether it will."""

    order: Order


class Connect(msgspec.Struct, frozen=True, array_like=True, tag="connect"):
    """Make an end for this end of a queue pair. Answered by `Connected`."""

    end: QueuePairEnd


class Connected(msgspec.Struct, frozen=True, array_like=True, tag="connected"):
    """The other end, and what can be read through it."""

    end: QueuePairEnd
    memory: RemoteMemory


class Disconnect(msgspec.Struct, frozen=True, array_like=True, tag="disconnect"):
    """Destroy the end for the asker's queue pair `number`. Answered by `Done`."""

    number: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """It was done; `good` says how it went where that is a question."""

    good: bool = True


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """It was not done: `text` says why, for the log. An `unknown` turn needs its order."""

    text: str
    unknown: bool = False


Question = Ask | Release | Leave | Invite | Connect | Disconnect
GIVES_BACK = (Release, Leave, Disconnect)
"""What is not taken back where nobody waits for the answer any more: it may come late, but it counts."""
Answer = Offered | Connected | Done | Failed


class Request(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A question under a number of its own, for which nobody waits longer than `timeout_s`."""

    number: int
    timeout_s: float
    body: Question


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to the question of that number."""

    number: int
    body: Answer


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Nobody waits for the answer of that number any more."""

    number: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Is there anybody? Answered by `Pong`."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Yes."""


Message = Request | Reply | Cancel | Ping | Pong

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Wire(Protocol):
    """A way for frames to another node, in order. It may break at any time."""

    def send(self, frame: bytes) -> None:
        """Send a frame, without waiting; raises `PeerLost`."""

    async def receive(self) -> bytes:
        """The next frame; raises `PeerError`, after which there is no other."""

    def close(self) -> None:
        """End it at once; idempotent."""

    async def wait_closed(self) -> None:
        """Wait, after `close`, until nothing is left of it; within a deadline."""


def encode(message: Message) -> bytes:
    """A message as a frame's content; raises `PeerError` where it is too large."""
    frame = _encoder.encode(message)
    if len(frame) > FRAME_BYTES:
        raise PeerError(f"a message of {len(frame)} bytes, at most {FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> Message:
    """The message of a frame; raises `PeerError`."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"a message that cannot be read: {error}") from error


def pack_turn(turn: Turn, trace: Trace | None = None) -> Order:
    """`turn`, with the `trace` of its prompt where that is known, for the way. In a thread."""
    prompt = msgspec.structs.replace(turn.prompt, ids=())
    rest = msgspec.structs.replace(turn, prompt=prompt, constraint=None)  # it is for who generates
    if trace is not None:
        return Order(np.frombuffer(trace.ids, "<i8").astype("<u4").tobytes(), rest, b"".join(trace.chain[1:]))
    # Piece by piece, since other threads stand still meanwhile.
    ids = turn.prompt.ids
    pieces = (ids[start : start + _PIECE_TOKENS] for start in range(0, len(ids), _PIECE_TOKENS))
    return Order(b"".join(struct.pack(f"<{len(piece)}I", *piece) for piece in pieces), rest)


def trace_order(layout: CacheLayout, order: Order) -> Trace:
    """The trace of a prompt on its way, to look things up with: its tokens are not unpacked, nor its pages hashed.

    In a thread. Raises `PeerError`.
    """
    _check(order)
    prompt = order.rest.prompt
    ids = np.frombuffer(order.ids, "<u4").astype("<i8").tobytes()
    return make_trace(layout, prompt.salt, ids, prompt.spans, order.links)


def unpack_turn(order: Order, name: str) -> Turn:
    """The turn of `order`, under another name. In a thread. Raises `PeerError`."""
    _check(order)
    size = 4 * _PIECE_TOKENS
    pieces = (np.frombuffer(order.ids[at : at + size], "<u4").tolist() for at in range(0, len(order.ids), size))
    ids = tuple(chain.from_iterable(pieces))
    prompt = msgspec.structs.replace(order.rest.prompt, ids=ids)
    return msgspec.structs.replace(order.rest, id=name, prompt=prompt)


def _check(order: Order) -> None:
    """Raise `PeerError` where it has no whole number of tokens."""
    if len(order.ids) % 4:
        raise PeerError("a prompt with a part of a token")

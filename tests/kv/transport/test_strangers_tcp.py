"""Whoever is not of the fleet gets nothing, whatever it sends, and costs little while it tries."""

import asyncio
import contextlib
import os
import random
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dsuf.errors import CommandError, PeerError, PeerLost
from dsuf.kv.transport import server as server_module
from dsuf.kv.transport.hello import HELLO_BYTES, Credentials, Stream, Terms, call
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.streams import Address, StreamWire
from dsuf.kv.transport.wire import LENGTH, Ping, Pong, decode, encode
from tests.kv.rig import ids
from tests.kv.test_handoff import until
from tests.kv.transport.rig import FAR, NEAR, SECRET, TERMS, Remote
from tests.toy import make_turn


@contextlib.asynccontextmanager
async def connection(pair: Remote) -> AsyncIterator[Stream]:
    """A bare connection to the server."""
    stream = Stream(*await asyncio.open_connection("127.0.0.1", pair.port))
    try:
        yield stream
    finally:
        stream.writer.transport.abort()


async def rest(stream: Stream) -> bytes:
    """What the server still says, until it hangs up, soon."""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            return await stream.reader.read(-1)
    return b""


async def check_serves(pair: Remote) -> None:
    """The real peer is served as if nothing had happened."""
    restored, _ = await pair.run(make_turn(f"check {random.random()}", ids(40, [random.randrange(10**6)])))
    assert restored.peer_tokens > 0


def other_peer(pair: Remote, **change: Any) -> PeerGiver:
    """A peer that differs from the real one."""
    it = {"me": NEAR, "other": FAR, "terms": TERMS, "credentials": SECRET, **change}
    address = Address(it["me"], it["other"], "127.0.0.1", pair.port, it["terms"], it["credentials"])
    return PeerGiver(it["other"], over_tcp(address))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"credentials": Credentials(b"another secret, as long")}, PeerError, "proof is wrong"),
        ({"credentials": Credentials(b"a secret of the fleet ")}, PeerError, "proof is wrong"),
        ({"terms": Terms("another model")}, PeerError, "another model"),
        ({"me": NodeName("far", "boot 9")}, PeerError, "called far"),
        ({"other": NodeName("far", "an earlier boot")}, PeerLost, "not there any more"),
        ({"other": NodeName("elsewhere", "boot 2")}, PeerError, "far answers where elsewhere says it is"),
    ],
    ids=str,
)
async def test_pitfall_14_who_is_not_of_the_fleet_gets_nothing(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with Remote(deadline_s=5) as pair:
        await pair.far.run(make_turn("a", ids(60)))
        peer = other_peer(pair, **change)
        with pytest.raises(error, match=text):
            await peer.offer(make_turn("b", ids(60)), 0, compute=False)
        with pytest.raises(PeerLost, match="a moment ago"):  # nobody waits for it a second time
            await peer.offer(make_turn("b", ids(60)), 0, compute=False)
        assert bool(peer.refusal) == (error is PeerError)
        await peer.close()
        assert pair.server.counters()["peers"] == pair.server.served_bytes == 0
        await check_serves(pair)


async def test_a_server_that_does_not_know_the_secret_learns_nothing_and_gives_nothing() -> None:
    """Somebody sits at the address of a peer: the reader hangs up before it asks for anything."""
    async with Remote(deadline_s=5) as pair:
        pair.server._credentials = Credentials(b"what an impostor guessed")
        turn = make_turn("a", ids(60))
        assert await pair.taker.take(turn) is None
        pair.server._credentials = SECRET


@pytest.mark.parametrize("size", [0, 1, 2, 3, 50, 600, 70_000])
async def test_garbage_before_the_proof(size: int) -> None:
    rng = random.Random(size)
    async with Remote(deadline_s=5, server={"hello_s": 0.2}) as pair:
        for _ in range(5):
            async with connection(pair) as stream:
                stream.writer.write(rng.randbytes(size))
                assert await rest(stream) == b""
        assert pair.server.refused == 5
        await check_serves(pair)


async def test_no_more_than_a_small_hello_is_read_from_strangers() -> None:
    async with Remote(deadline_s=5, server={"hello_s": 60}) as pair:
        for claimed in (HELLO_BYTES + 1, 65_535):
            async with connection(pair) as stream:
                stream.writer.write(struct.pack(">BH", 0xD5, claimed))
                assert await rest(stream) == b""
        async with connection(pair) as stream:  # a good size, and rubbish in it
            stream.writer.write(struct.pack(">BH", 0xD5, 100) + os.urandom(100))
            assert await rest(stream) == b""
        await check_serves(pair)


async def test_slow_strangers_are_hung_up_on() -> None:
    """One byte at a time buys no time."""
    async with Remote(deadline_s=5, server={"hello_s": 0.3}) as pair:
        async with connection(pair) as stream:
            started_s = asyncio.get_running_loop().time()
            with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop: "the handler is closed"
                for byte in struct.pack(">BH", 0xD5, 400) + bytes(400):
                    stream.writer.write(bytes([byte]))
                    await stream.writer.drain()
                    await asyncio.sleep(0.05)
                    if stream.reader.at_eof():
                        break
            assert await rest(stream) == b""
            assert asyncio.get_running_loop().time() - started_s < 10
        await check_serves(pair)


async def test_too_many_strangers_are_hung_up_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 4)
    async with Remote(deadline_s=5, server={"hello_s": 2}) as pair, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connection(pair)) for _ in range(4)]
        await until(lambda: pair.server.counters()["strangers"] == 4)
        for _ in range(3):
            assert await rest(await stack.enter_async_context(connection(pair))) == b""
        streams[0].writer.transport.abort()
        await until(lambda: pair.server.counters()["strangers"] == 3)
        await check_serves(pair)


async def test_a_proof_cannot_be_used_again() -> None:
    """Everything that a real peer sent is sent once more by somebody who listened."""
    async with Remote(deadline_s=5) as pair:
        heard: list[bytes] = []
        async with connection(pair) as stream:
            write = stream.writer.write
            stream.writer.write = lambda data: (heard.append(bytes(data)), write(data))[1]  # type: ignore
            await call(stream, NEAR, FAR, "control", TERMS, SECRET)
        async with connection(pair) as stream:
            for data in heard:
                stream.writer.write(data)
            said = await rest(stream)
        assert b"proof is wrong" in said
        assert pair.server.counters()["peers"] == 0
        await check_serves(pair)


@pytest.mark.parametrize("purpose", ["control", "data"])
@pytest.mark.parametrize("kind", ["oversize", "rubbish", "cut", "hangs up"])
async def test_a_peer_that_goes_mad_is_dropped(purpose: Any, kind: str) -> None:
    """It has proved itself, and then sends what cannot be read."""
    async with Remote(deadline_s=5) as pair:
        mad = NodeName("mad", "boot")
        async with connection(pair) as stream:
            await call(stream, mad, FAR, purpose, TERMS, SECRET)
            await until(lambda: pair.server.counters()["connections"] == 1)
            sent = {
                "oversize": LENGTH.pack(2**32 - 1), "rubbish": LENGTH.pack(40) + b"\xc1" * 40,
                "cut": LENGTH.pack(40) + b"\x93", "hangs up": b"",
            }[kind]  # fmt: skip
            stream.writer.write(sent)
            if kind in ("cut", "hangs up"):
                stream.writer.write_eof()
            assert await rest(stream) == b""
        await until(lambda: pair.server.counters()["connections"] == 0)
        await check_serves(pair)


async def test_signs_of_life_are_answered_and_silence_ends_a_connection() -> None:
    async with Remote(deadline_s=5, server={"silence_s": 0.3}) as pair:
        async with connection(pair) as stream:
            await call(stream, NodeName("quiet", "boot"), FAR, "control", TERMS, SECRET)
            wire = StreamWire(stream)
            wire.send(encode(Ping()))
            answer = decode(await wire.receive())
            assert isinstance(answer, Pong | Ping)
            await until(lambda: pair.server.counters()["peers"] == 0, 20)
        await check_serves(pair)


@pytest.mark.parametrize("secret", [b"", b"too short"])
def test_a_fleet_without_a_good_secret_does_not_start(secret: bytes) -> None:
    with pytest.raises(CommandError, match="peer_secret"):
        Credentials(secret).check()

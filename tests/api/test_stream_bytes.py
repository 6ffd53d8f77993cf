"""What a stream's bytes are, however they are written: at once, after waiting, or to an old client without chunks."""

import asyncio
import json
import socket

from dsuf.types import StepResult, Turn
from tests.api.rig import Rig, Step, chat_body, connect

WORDS = 600


def script_words(rig: Rig, repeats: int = 1) -> None:
    """Every turn gets the same words, one a step."""
    ids = rig.vocabulary.encode(" something" * WORDS)

    def script(turn: Turn) -> list[Step]:
        steps: list[Step] = [StepResult(turn=turn.id, ids=(token,) * repeats) for token in ids]
        return [*steps, StepResult(turn=turn.id, finish="stop")]

    rig.submit.script = script


async def read_response(raw: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of a response, read piece by piece until the server has ended it."""
    loop, received = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(60):
        # With the line's end before it: a head alone may end in a request id whose last digit is 0.
        while not received.endswith(b"\r\n0\r\n\r\n") and (data := await loop.sock_recv(raw, 1 << 16)):
            received += data
    raw.close()
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return head, body


def join_chunks(body: bytes) -> list[bytes]:
    """The chunks of a whole body in chunked coding; anything else is an error."""
    chunks, place = [], 0
    while True:
        end = body.index(b"\r\n", place)
        length = int(body[place:end], 16)
        assert body[place:end] == b"%x" % length
        place = end + 2 + length
        assert body[place : place + 2] == b"\r\n"
        chunks.append(body[end + 2 : place])
        place += 2
        if not length:
            assert place == len(body)
            return chunks[:-1]


def read_content(stream: bytes) -> str:
    """The text of a stream's events, which must end in the regular way."""
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    deltas = [json.loads(event.removeprefix(b"data: "))["choices"] for event in events]
    return "".join(choice["delta"].get("content") or "" for choices in deltas for choice in choices)


async def test_each_step_is_one_chunk(rig: Rig) -> None:
    script_words(rig)
    head, body = await read_response(
        await connect(rig.port, "/v1/chat/completions", chat_body(stream=True, thinking={"type": "disabled"}))
    )
    chunks = join_chunks(body)
    assert b"Transfer-Encoding: chunked" in head
    assert read_content(b"".join(chunks)) == " something" * WORDS
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    assert len(chunks) >= WORDS


async def test_a_slow_reader_gets_the_same(rig: Rig) -> None:
    """Writes that had to wait stand in order with those that had not."""
    script_words(rig, repeats=2000)
    raw = await connect(rig.port, "/v1/chat/completions", chat_body(stream=True, thinking={"type": "disabled"}))
    given = -1
    while not rig.submit.tickets or given != rig.submit.last.given:
        given = rig.submit.last.given if rig.submit.tickets else -1
        await asyncio.sleep(0.2)
    assert 0 < given < WORDS  # the server waits for us
    _, body = await read_response(raw)
    assert read_content(b"".join(join_chunks(body))) == " something" * (WORDS * 2000)


async def test_no_chunks_for_an_old_client(rig: Rig) -> None:
    script_words(rig)
    body = json.dumps(chat_body(stream=True, thinking={"type": "disabled"})).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    head, _, stream = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert read_content(stream) == " something" * WORDS
    writer.close()

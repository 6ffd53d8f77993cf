"""Clients that leave: at each stage, in each way, streaming or not. The turn is cancelled; nobody calls it an error."""

import asyncio
import logging
import random

import pytest

from dsuf.types import StepResult, Turn
from tests.api.rig import Rig, Step, chat_body, connect, leave, until

WAYS = ["close", "half-close", "reset"]
FOREVER = float("inf")


def script_for(stage: str, rig: Rig) -> None:
    """Bring every turn to `stage`, and leave it there until it is cancelled."""
    token = tuple(rig.vocabulary.encode("Hm"))
    flood = tuple(rig.vocabulary.encode(" something" * 400))

    def script(turn: Turn) -> list[Step]:
        prefilled, decoded = StepResult(turn=turn.id, prefilled=1), StepResult(turn=turn.id, ids=token)
        return {
            "queued": [FOREVER],
            "prefilling": [prefilled, FOREVER],
            "decoding": [prefilled, decoded, FOREVER],
            "writing": [StepResult(turn=turn.id, ids=flood)] * 100_000,
        }[stage]

    rig.submit.script = script


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("stage", "stream"),
    [(stage, stream) for stage in ("queued", "prefilling", "decoding") for stream in (True, False)]
    + [("writing", True)],  # a whole reply is written when its turn is over
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_pitfall_16_clients_that_leave(
    rig: Rig, caplog: pytest.LogCaptureFixture, path: str, stream: bool, stage: str, way: str
) -> None:
    script_for(stage, rig)
    asked = {"input": "Say hi."} if path == "/v1/responses" else {"prompt": "Say"} if "chat" not in path else {}
    raw = await connect(rig.port, path, chat_body(stream=stream) | asked)
    results = {"queued": 0, "prefilling": 1, "decoding": 2, "writing": 1}[stage]
    await until(lambda: bool(rig.submit.tickets) and rig.submit.last.given >= results)
    if stage == "writing":
        await until_blocked(rig)
    else:
        await asyncio.sleep(0.02)
    leave(raw, way)
    await until(rig.submit.last.cancelled.is_set)
    await until(lambda: bool(rig.metrics.responses))
    assert rig.metrics.disconnects == [stage]
    assert rig.metrics.responses == [(path, 499)]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    raw.close()


async def until_blocked(rig: Rig) -> None:
    """Wait until no result has been taken for a while, because nobody reads what was written."""
    async with asyncio.timeout(20):
        before = -1
        while before != rig.submit.last.given:
            before = rig.submit.last.given
            await asyncio.sleep(0.15)


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_while_the_body_is_read(rig: Rig, caplog: pytest.LogCaptureFixture, way: str) -> None:
    loop = asyncio.get_running_loop()
    raw = await connect(rig.port, "/health", b"")
    await loop.sock_recv(raw, 1000)
    await loop.sock_sendall(raw, b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    await asyncio.sleep(0.05)
    leave(raw, way)
    await until(lambda: rig.metrics.disconnects == ["reading"])
    assert rig.submit.tickets == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    raw.close()


async def test_leaving_between_requests_is_no_disconnect(rig: Rig) -> None:
    for way in WAYS:
        raw = await connect(rig.port, "/v1/messages", chat_body())
        await asyncio.get_running_loop().sock_recv(raw, 10_000)
        leave(raw, way)
        raw.close()
    await until(lambda: len(rig.metrics.responses) == 3)
    await asyncio.sleep(0.05)
    assert rig.metrics.disconnects == []


async def test_many_leave_at_random(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(5)
    token = tuple(rig.vocabulary.encode("Hm"))

    def script(turn: Turn) -> list[Step]:
        return [0.05, StepResult(turn=turn.id), 0.05, *([StepResult(turn=turn.id, ids=token), 0.01] * 500)]

    rig.submit.script = script

    async def visit() -> None:
        raw = await connect(rig.port, chance.choice(["/v1/messages", "/chat/completions"]),
                            chat_body(stream=chance.random() < 0.5))  # fmt: skip
        await asyncio.sleep(chance.random() * 0.4)
        way = chance.choice(WAYS)
        leave(raw, way)
        if way == "half-close":
            await asyncio.sleep(0.3)
            raw.close()

    await asyncio.gather(*(visit() for _ in range(64)))
    await until(lambda: len(rig.metrics.responses) == 64)
    assert all(ticket.cancelled.is_set() for ticket in rig.submit.tickets)
    assert {status for _, status in rig.metrics.responses} == {499}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_probe_that_half_closes_gets_its_answer(rig: Rig, pieces: int) -> None:
    """As `nc -N` does: everything is sent, then the sending side is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    request = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n" * pieces
    writer.write(request)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.count(b"HTTP/1.1 200") >= 1 and b'"ready":true' in answer
    writer.close()

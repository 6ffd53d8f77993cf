"""Endings other than an answer: before the first byte as a status, after it within the stream; and silence."""

import asyncio
import json
import logging
import time

import aiohttp
import pytest

from dsuf.errors import ContextTooLong, EngineFailed, QueueFull, RequestError, Unavailable
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import StepResult, Turn
from tests.api.rig import Rig, Step, chat_body, connect, message_body, read_events, receive, serve, until

REFUSALS = [
    (QueueFull("64 requests wait already", retry_after_s=99), 429, "rate_limit_error", "10"),
    (QueueFull("64 requests wait already"), 429, "rate_limit_error", "1"),
    (Unavailable("starting", retry_after_s=0), 503, "overloaded_error", "1"),
    (ContextTooLong("maximum context length is 5 tokens"), 400, "invalid_request_error", None),
]
FORBIDDEN = ("quota exceeded", "usage limit reached", "insufficient balance")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), REFUSALS)
async def test_refused_by_the_scheduler(
    rig: Rig, error: RequestError, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    rig.submit.refusal = error
    for response in (await rig.chat(stream=stream), await rig.message(stream=stream)):
        assert response.status == status and response.headers.get("retry-after") == retry_after
        body = await response.json()
        assert body["error"]["type"] == kind and body["error"]["message"] == error.message
        assert not any(phrase in body["error"]["message"] for phrase in FORBIDDEN)


def play_failure(rig: Rig, error: Exception, *, after: str | None) -> None:
    """Raise `error`: at once, or when the ids of `after` are out."""

    def script(turn: Turn) -> list[Step]:
        steps: list[Step] = [] if after is None else [StepResult(turn=turn.id, ids=tuple(rig.vocabulary.encode(after)))]
        return [*steps, error]

    rig.submit.script = script


@pytest.mark.parametrize("after", [None, "Hm.</think>Half an ans"])
@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (EngineFailed("the engine failed"), 500, "api_error", "the engine failed"),
        (Unavailable("shutting down", retry_after_s=2), 503, "overloaded_error", "shutting down"),
        (ZeroDivisionError("secret detail"), 500, "api_error", "internal error"),
    ],
)
async def test_failures_of_whole_replies(
    rig: Rig, after: str | None, error: Exception, status: int, kind: str, message: str
) -> None:
    play_failure(rig, error, after=after)
    for response in (await rig.chat(), await rig.message()):
        body = await response.json()
        assert response.status == status
        assert body["error"]["type"] == kind and body["error"]["message"] == message
        assert "secret" not in await response.text() and "Traceback" not in await response.text()
        assert rig.submit.last.cancelled.is_set()


@pytest.mark.parametrize("after", [None, "Hm.</think>Half an ans"])
async def test_messages_tell_of_a_failure_by_an_error_event(rig: Rig, after: str | None) -> None:
    play_failure(rig, EngineFailed("the engine failed"), after=after)
    response = await rig.message(stream=True)
    events = read_events(await response.text())
    assert response.status == 200 and [name for name, _ in events].count("message_stop") == 0
    name, data = events[-1]
    assert name == "error" and '"type":"api_error","message":"the engine failed"' in data


@pytest.mark.parametrize("after", [None, "Hm.</think>Half an ans"])
async def test_chat_tells_of_a_failure_and_breaks_the_connection(rig: Rig, after: str | None) -> None:
    play_failure(rig, EngineFailed("the engine failed"), after=after)
    received = b""
    response = await rig.client.post(rig.url + "/v1/chat/completions", json=chat_body(stream=True))
    assert response.status == 200
    with pytest.raises(aiohttp.ClientPayloadError):  # not a clean end
        async for piece in response.content.iter_any():
            received += piece
    assert b"[DONE]" not in received
    last = read_events(received.decode())[-1][1]
    assert last.startswith('{"error":{') and "the engine failed" in last and '"type":"api_error"' in last


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_form_that_cannot_be_kept_is_a_final_failure(rig: Rig, path: str) -> None:
    """Of a kind that clients do not try again: a stream ends in the regular way, but not as a whole one."""
    text = tuple(rig.vocabulary.encode("Hm.</think>Half an ans"))
    rig.submit.script = lambda turn: [
        StepResult(turn=turn.id, ids=text), StepResult(turn=turn.id, finish="stop", fault="no text does")
    ]  # fmt: skip
    body = {"model": "deepseek-flash", "input": "Hi"} if path == "/v1/responses" else chat_body()
    whole = await rig.post(path, body)
    error = (await whole.json())["error"]
    assert (whole.status, error["type"]) == (400, "invalid_request_error") and "no text does" in error["message"]
    told = await (await rig.post(path, body | {"stream": True})).text()
    last = read_events(told)[-1][1]
    assert ("invalid_prompt" if path == "/v1/responses" else "invalid_request_error") in last
    assert not any(sign in told for sign in ("[DONE]", "message_stop", "response.completed", '"finish_reason":"stop"'))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_ticket_that_just_ends_is_a_failure(rig: Rig, stream: bool) -> None:
    rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=(5,))]
    response = await rig.message(stream=stream)
    assert response.status == (200 if stream else 500) and "internal error" in await response.text()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_comments_break_silence(vocabulary: Vocabulary, path: str) -> None:
    async with serve(vocabulary, keep_alive_s=0.05) as rig:

        def script(turn: Turn) -> list[Step]:
            ids = tuple(vocabulary.encode("Hm.</think>Hi"))
            return [0.22, StepResult(turn=turn.id, prefilled=1), 0.22, StepResult(turn=turn.id, ids=ids, finish="stop")]

        rig.submit.script = script
        body = chat_body(stream=True)
        started_s = time.monotonic()
        text = await (await rig.post(path, body)).text()
        most = (time.monotonic() - started_s) / 0.05 + 2  # a busy machine lets more time pass between the results
        first = text.index("data:")  # the first event comes with the first result
        for silence in (text[:first], text[first:]):
            assert 1 <= silence.count(": keep-alive\n\n") <= most
        assert read_events(text)[-1][1] in ("[DONE]", '{"type":"message_stop"}')
        assert ": keep-alive" not in await (await rig.post(path, chat_body())).text()


async def test_headers_come_before_the_first_result(rig: Rig) -> None:
    rig.submit.script = lambda turn: [float("inf")]
    response = await asyncio.wait_for(rig.client.post(rig.url + "/v1/messages", json=message_body(stream=True)), 20)
    assert response.status == 200 and not rig.submit.last.cancelled.is_set()
    response.close()


async def test_a_slow_reader_is_given_up(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, write_timeout_s=0.3) as rig:
        word = tuple(vocabulary.encode(" something" * 200))
        rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=word)] * 20_000
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, limit=1)
        body = b'{"model": "deepseek-flash", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
        head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: bool(rig.submit.tickets))
        await asyncio.wait_for(rig.submit.last.cancelled.wait(), 15)
        assert rig.metrics.disconnects == ["writing"]
        assert rig.submit.last.given < 20_000
        writer.close()
        del reader


async def test_a_slow_reader_of_a_whole_reply_is_given_up(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, write_timeout_s=0.3) as rig:
        word = tuple(vocabulary.encode(" something" * 1000))
        rig.submit.script = lambda turn: (
            [StepResult(turn=turn.id, ids=word)] * 1000 + [StepResult(turn=turn.id, finish="length")]
        )
        raw = await connect(rig.port, "/v1/messages", message_body())
        await until(lambda: len(rig.metrics.responses) == 1, 60.0)
        await asyncio.sleep(0.6)
        assert len(await receive(raw)) < 9_000_000  # it took what the kernel's buffers held, and then an end
        raw.close()


async def test_one_log_line_a_request_without_content(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dsuf")
    rig.play("Hm.</think>Hidden words")
    secret = [{"role": "user", "content": "a secret"}]
    await rig.post("/chat/completions", chat_body(messages=secret), x_request_id="r-1", authorization="Bearer sk-top")
    await rig.chat(n=2)
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    assert len(lines) == 2
    fields = lines[0].fields  # type: ignore[attr-defined]
    assert fields["id"] == "r-1" and fields["endpoint"] == "/v1/chat/completions" and fields["status"] == 200
    assert fields["finish"] == "stop" and fields["model"] == "deepseek-flash"
    assert fields["prompt_tokens"] == len(rig.submit.last.turn.prompt.ids)
    assert fields["completion_tokens"] == len(rig.vocabulary.encode("Hm.</think>Hidden words"))
    assert 0 <= fields["first_token_s"] <= fields["total_s"] < 5
    assert lines[1].fields["status"] == 400 and lines[1].fields["failure"] == "ConversionRefused"  # type: ignore[attr-defined]
    everything = " ".join(str(record.__dict__) for record in caplog.records)
    assert not any(word in everything for word in ("secret", "Hidden", "sk-top"))
    assert rig.metrics.responses == [("/v1/chat/completions", 200), ("/v1/chat/completions", 400)]


async def test_running_streams_outlive_the_start_of_a_drain(rig: Rig) -> None:
    ids = tuple(rig.vocabulary.encode("Hm.</think>Hi"))
    rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=ids), 0.2, StepResult(turn=turn.id, finish="stop")]
    running = asyncio.create_task(rig.message(stream=True))
    await until(lambda: bool(rig.submit.tickets))
    rig.status.draining = True
    assert (await rig.message()).status == 503 and (await rig.chat(stream=True)).status == 503
    assert read_events(await (await running).text())[-1][0] == "message_stop"
    assert len(rig.submit.tickets) == 1


@pytest.mark.parametrize(("expect", "asked"), [("100-continue", True), ("foo", False)])
async def test_expectations(rig: Rig, expect: str, asked: bool) -> None:
    """A client may wait to be asked for its body; what else it expects is no reason to refuse."""
    rig.play("Hm.</think>Hi")
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = json.dumps(chat_body()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: {expect}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode())
    if asked:
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_long_foreign_name_is_no_model(rig: Rig) -> None:
    response = await rig.post("/v1/messages", message_body(model="claude-" + "x" * 10_000))
    assert response.status == 400
    assert (await rig.post("/v1/messages", message_body(model="claude-sonnet"))).status == 200

"""Results that are pushed from within the step that gave them: the client gets what it gets by waking for each."""

import asyncio
from typing import Any

import pytest

from dsuf.api.outbox import Outbox
from dsuf.recipe.reader import Reader
from dsuf.types import Logprob, StepResult, Turn
from tests.api.rig import Rig, Step, chat_body, connect, hide_ids, read_events

PIECES = ["Think", "ing</think>", "Some ", "text \U0001f422 with STOP", " in it", " and more"]


async def read_both(rig: Rig, path: str, body: dict[str, Any]) -> list[str]:
    """The reply with results pushed, and without."""
    replies = []
    for rig.submit.pushes in (True, False):
        replies.append(hide_ids(await (await rig.post(path, body)).text()))
    return replies


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("fields", [{}, {"stop": "STOP", "stop_sequences": ["STOP"]}], ids=["plain", "stop string"])
@pytest.mark.parametrize("stream", [True, False])
async def test_pushed_replies_are_the_same(rig: Rig, path: str, fields: dict[str, Any], stream: bool) -> None:
    rig.play(*PIECES)
    name = "stop" if path.endswith("completions") else "stop_sequences"
    body = chat_body(stream=stream, max_tokens=100) | {key: value for key, value in fields.items() if key == name}
    pushed, read = await read_both(rig, path, body)
    assert pushed == read and "text" in pushed
    first, second = rig.submit.tickets
    assert first.iterated < second.iterated
    assert (first.reason, first.used_tokens) == (second.reason, second.used_tokens)
    assert first.reason == ("stop" if fields else "abort")


async def test_most_of_a_stream_is_pushed(rig: Rig) -> None:
    rig.play(*["word "] * 100)
    reply = await (await rig.chat(stream=True)).text()
    assert reply.count("word ") == 100
    assert rig.submit.last.iterated == 2  # the first and the last


async def test_what_fails_while_it_is_pushed_fails_the_reply(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, fed = Reader.feed, list[int]()

    def fail(reader: Reader, ids: tuple[int, ...], logprobs: tuple[Logprob, ...] = ()) -> Any:
        fed.append(len(ids))
        if len(fed) == 3:
            raise RuntimeError("no such text")
        return feed(reader, ids, logprobs)

    monkeypatch.setattr(Reader, "feed", fail)
    rig.play(*["word "] * 6)
    for stream in (True, False):
        fed.clear()
        reply = await (await rig.message(stream=stream)).text()
        assert "internal error" in reply and "no such text" not in reply
        assert rig.submit.last.cancelled.is_set() and len(fed) == 3


async def test_results_that_a_client_does_not_take_wait_with_the_ticket(rig: Rig) -> None:
    """Its reply is whole once it reads, and what was pushed and what was sent stand in order."""
    words = [f"w{i} " for i in range(400)]

    def script(turn: Turn) -> list[Step]:
        ids = [tuple(rig.vocabulary.encode(word * 40)) for word in words]
        return [*(StepResult(turn=turn.id, ids=piece) for piece in ids), StepResult(turn=turn.id, finish="stop")]

    rig.submit.script = script
    raw = await connect(rig.port, "/v1/messages", chat_body(stream=True), close=True)
    loop, received = asyncio.get_running_loop(), bytearray()
    await asyncio.sleep(0.3)
    async with asyncio.timeout(20):
        while piece := await loop.sock_recv(raw, 1 << 12):
            received += piece
            await asyncio.sleep(0)
    raw.close()
    places = [received.find(word.encode()) for word in words]
    assert places == sorted(places) and places[0] > 0
    assert b"message_stop" in received


class Sink:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes, now_s: float) -> None:
        """Note `data`."""
        assert now_s > 0
        if data == b"fails":
            raise RuntimeError("no way out")
        self.written.append(data)


def test_an_outbox_writes_when_it_is_told_and_in_order(caplog: pytest.LogCaptureFixture) -> None:
    outbox, first, second = Outbox(), Sink(), Sink()
    outbox.flush()
    for sink, data in ((first, b"a"), (first, b"b"), (second, b"fails"), (second, b"c")):
        outbox.put(sink, data)
    assert first.written == second.written == []
    outbox.flush()
    outbox.flush()
    assert (first.written, second.written) == ([b"a", b"b"], [b"c"])
    assert [record.message for record in caplog.records] == ["write failed"]


async def test_events_are_named_where_the_protocol_names_them(rig: Rig) -> None:
    rig.play("some", " text")
    names = {name for name, _ in read_events(await (await rig.message(stream=True)).text())}
    assert None not in names and "content_block_delta" in names

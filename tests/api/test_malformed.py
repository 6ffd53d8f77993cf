"""Random malformed bodies and bytes: never a 5xx, a hang or a traceback. The seeds are fixed."""

import asyncio
import gzip
import json
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from dsuf.recipe.vocabulary import Vocabulary
from tests.api.rig import Rig, serve

PATHS = [
    "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/completions", "/tokenize", "/detokenize",
]  # fmt: skip
ANSWER_S = 10.0
CONNECTIONS = 4

SEEDS: list[dict[str, Any]] = [
    {
        "model": "deepseek-flash", "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Grüße 世界"}]},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
        "tools": [{"type": "function", "function": {
            "name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}}}],
        "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "stop": ["END"], "seed": 5, "stream": False,
        "thinking": {"type": "enabled"}, "reasoning_effort": "high", "max_completion_tokens": None,
    },
    {
        "model": "deepseek-flash", "system": [{"type": "text", "text": "Be brief."}], "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                              {"type": "tool_use", "id": "t1", "name": "read", "input": {"a": [1]}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "done"}]},
        ],
        "tools": [{"name": "read", "input_schema": {"type": "object"}}], "max_tokens": 50,
        "stop_sequences": ["END"], "output_config": {"effort": "low"},
    },
    {
        "model": "deepseek-flash", "instructions": "Be brief.", "input": [
            {"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "web_search"}],
        "max_output_tokens": 50, "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}},
        "previous_response_id": None, "background": False, "stream_options": None,
    },
    {
        "model": "deepseek-flash", "prompt": "Once upon", "suffix": "the end", "max_tokens": 50, "stop": ["END"],
        "echo": False, "best_of": 1, "n": 1, "temperature": 1, "top_p": 0.5, "seed": 3, "logprobs": None,
    },
    {"prompt": "some text", "tokens": [1, 2, 3]},
]  # fmt: skip
ODD = [None, True, -1, 0, 1e308, 2**64, 2**200, "", "\0", "x" * 300, [], {}, [[]], [None], {"type": None}, "developer"]


def mutate_value(chance: random.Random, value: Any) -> Any:
    """`value` with one odd thing somewhere inside."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: mutate_value(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], mutate_value(chance, value[place]), *value[place + chance.randrange(2) :]]
    return chance.choice(ODD)


def mutate_bytes(chance: random.Random, body: bytes) -> bytes:
    """`body` with a few bytes changed, dropped or repeated, or cut short."""
    data = bytearray(body)
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(data) or 1)
        match chance.randrange(4):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + chance.randrange(1, 9)]
            case 2:
                data[place:place] = data[place : place + chance.randrange(1, 40)]
            case _:
                del data[chance.randrange(len(data) or 1) :]
    return bytes(data)


def make_body(chance: random.Random) -> bytes:
    """A body that is most likely wrong."""
    seed = json.dumps(chance.choice(SEEDS), ensure_ascii=chance.random() < 0.5).encode()
    makers: list[Callable[[], bytes]] = [
        lambda: mutate_bytes(chance, seed),
        lambda: json.dumps(mutate_value(chance, mutate_value(chance, json.loads(seed)))).encode(),
        lambda: chance.randbytes(chance.randrange(200)),
        lambda: chance.choice([b"[", b'{"a":', b'{"messages":[']) * chance.randrange(1, 2000),
        lambda: chance.choice([b"null", b"1", b'"x"', b"[1]", b"{}", b"\xef\xbb\xbf{}", b"{}{}", b"-", b'"\\ud800"']),
    ]
    return chance.choices(makers, weights=[5, 5, 1, 1, 1])[0]()


def frame_body(chance: random.Random, body: bytes) -> tuple[list[str], bytes]:
    """Headers and payload that carry `body`, at times compressed, chunked, or badly so."""
    kind = chance.random()
    if kind < 0.8:
        return [f"content-length: {len(body)}"], body
    if kind < 0.9:
        packed = gzip.compress(body) if chance.random() < 0.5 else mutate_bytes(chance, gzip.compress(body))
        return ["content-encoding: gzip", f"content-length: {len(packed)}"], packed
    chunks = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n" if body else b"0\r\n\r\n"
    return ["transfer-encoding: chunked"], chunks if chance.random() < 0.5 else b"zz\r\n" + chunks


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection stays."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
    if "content-length" in fields:
        body = await reader.readexactly(int(fields["content-length"]))
    else:
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
    return int(head.split(" ")[1]), body, head.startswith("HTTP/1.1") and fields.get("connection") != "close"


async def bombard(rig: Rig, seed: int, count: int) -> dict[int, int]:
    """Send `count` bodies over connections kept as long as the server keeps them; replies by status."""
    chance, statuses = random.Random(seed), dict[int, int]()
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    for number in range(count):
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", rig.port)
        reader, writer = connection
        headers, payload = frame_body(chance, body := make_body(chance))
        head = [f"POST {chance.choice(PATHS)} HTTP/1.1", "host: x", "content-type: application/json", *headers]
        writer.write("\r\n".join([*head, "", ""]).encode() + payload)
        try:
            status, reply, kept = await asyncio.wait_for(read_reply(reader), ANSWER_S)
        except TimeoutError:
            pytest.fail(f"seed {seed}, body {number}: no answer within {ANSWER_S} s to {body[:300]!r}")
        assert status < 500, (seed, number, body, reply)
        assert b"Traceback" not in reply and b'File "' not in reply
        if status != 200:
            assert json.loads(reply)["error"]["message"], (seed, number)
        statuses[status] = statuses.get(status, 0) + 1
        if not kept:
            writer.close()
            connection = None
    if connection is not None:
        connection[1].close()
    return statuses


async def bombard_all(rig: Rig, total: int, seed: int) -> dict[int, int]:
    """Several connections at once."""
    share = total // CONNECTIONS
    counts: dict[int, int] = {}
    for statuses in await asyncio.gather(*(bombard(rig, seed + i, share) for i in range(CONNECTIONS))):
        for status, count in statuses.items():
            counts[status] = counts.get(status, 0) + count
    assert sum(counts.values()) == share * CONNECTIONS
    return counts


async def test_malformed_bodies(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    counts = dict[int, int]()
    for batch in range(10):
        for status, count in (await bombard_all(rig, 1_000, seed=100 + 10 * batch)).items():
            counts[status] = counts.get(status, 0) + count
    assert sum(counts.values()) == 10_000
    assert counts[400] > 8_000 and counts[200] > 100  # most are wrong, and some survive
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def make_bytes(chance: random.Random) -> bytes:
    """What is hardly HTTP."""
    request = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    head, _, _ = request.partition(b"\r\n\r\n")
    return chance.choice(
        [
            lambda: chance.randbytes(chance.randrange(1, 300)),
            lambda: mutate_bytes(chance, request),
            lambda: mutate_bytes(chance, head) + b"\r\n\r\n{}",
            lambda: head.replace(b"2", chance.choice([b"-1", b"2, 3", b"x", b"9" * 30])) + b"\r\n\r\n{}",
            lambda: head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + chance.randbytes(50),
            lambda: b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
            lambda: head + b"\r\n" + b"x: y\r\n" * 500 + b"\r\n{}",
            lambda: b"\x16\x03\x01\x02\x00" + chance.randbytes(60),
            lambda: request * chance.randrange(2, 80),
        ]
    )()


async def test_malformed_http(vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(vocabulary, header_timeout_s=0.2, body_timeout_s=0.2) as rig:
        chance = random.Random(7)

        async def send(data: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(data)
            reply = b""
            try:
                async with asyncio.timeout(0.6):
                    while piece := await reader.read(1 << 16):
                        reply += piece
            except (TimeoutError, ConnectionError):
                pass
            for status in reply.split(b"HTTP/1.1 ")[1:]:
                assert status[:1] in b"24", (data, reply)
            assert b"Traceback" not in reply and b"<html" not in reply
            writer.close()

        for _ in range(10):
            await asyncio.gather(*(send(make_bytes(chance)) for _ in range(30)))
        assert (await rig.message()).status == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

"""The load generator's arithmetic: what a stream's lines become, and what is made of many."""

import json
import math
import random
import statistics
from typing import Any

import pytest

from bench.chat import Reply
from bench.figures import Record, count_errors, percentile, read_sources, share_sources, summarise

DETAILS = {"cached_tokens": 60, "device_tokens": 10, "host_tokens": 50, "peer_tokens": 0, "computed_tokens": 40}


def chunk(delta: dict[str, Any], **fields: Any) -> bytes:
    """A data line."""
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} | fields).encode()


def read(lines: list[bytes]) -> Reply:
    """`lines`, one a second."""
    reply = Reply()
    for number, line in enumerate(lines):
        reply.take(line, float(number))
    return reply


def test_a_stream_is_read() -> None:
    reply = read([
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm"}),
        chunk({"content": "One "}),
        chunk({"content": "two"}),
        json.dumps({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 7,
                                             "prompt_tokens_details": DETAILS}}).encode(),
        b"[DONE]",
    ])  # fmt: skip
    assert reply.content == "One two" and reply.done and reply.error is None
    assert reply.arrivals_s == [1.0, 2.0, 3.0]  # the opening of the reply is no token
    record = reply.record(turn=2, started_s=-1.0)
    assert record.first_token_s == 2.0
    assert record.gaps_s == [1.0, 1.0]
    assert record.tokens_per_s == 6 / 2.0
    assert record.sources == {"device": 10, "host": 50, "peer": 0, "computed": 40}


def test_calls_are_put_together() -> None:
    parts = [
        {"index": 0, "id": "call-1", "function": {"name": "read_", "arguments": ""}},
        {"index": 0, "function": {"name": "file", "arguments": '{"pa'}},
        {"index": 1, "id": "call-2", "function": {"name": "list_folder", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": 'th": 1}'}},
    ]
    reply = read([chunk({"tool_calls": [part]}) for part in parts])
    assert reply.calls == {
        0: {"id": "call-1", "name": "read_file", "arguments": '{"path": 1}'},
        1: {"id": "call-2", "name": "list_folder", "arguments": "{}"},
    }
    assert len(reply.arrivals_s) == 4


def test_an_error_in_a_stream_is_named() -> None:
    reply = read([chunk({"content": "x"}), b'{"error": {"type": "engine_failed", "message": "no"}}'])
    assert reply.error == "stream: engine_failed"


def test_sources_of_other_servers() -> None:
    assert read_sources({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}) == {
        "device": 4, "host": 0, "peer": 0, "computed": 5,
    }  # fmt: skip
    assert sum(read_sources({"prompt_tokens": 9}).values()) == 9
    assert sum(read_sources({}).values()) == 0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_percentile_by_its_definition(share: float) -> None:
    """The smallest value that covers the share, found by trying them all."""
    chance = random.Random(2)
    for size in range(1, 40):
        values = [chance.randrange(20) for _ in range(size)]
        covering = [value for value in values if sum(other <= value for other in values) >= share * size]
        assert percentile(values, share) == min(covering)
    assert math.isnan(percentile([], share))


def make_record(chance: random.Random, turn: int) -> Record:
    """A whole reply of random length and pace."""
    started = chance.uniform(0, 10)
    arrivals = [started + 1]
    for _ in range(chance.randrange(30)):
        arrivals.append(arrivals[-1] + chance.uniform(0.01, 0.2))
    prompt, cached = chance.randrange(1, 500), 0
    cached = chance.randrange(prompt)
    return Record(
        turn=turn, started_s=started, ended_s=arrivals[-1], arrivals_s=tuple(arrivals), prompt_tokens=prompt,
        completion_tokens=len(arrivals), sources={"host": cached, "computed": prompt - cached},
    )  # fmt: skip


def test_summary() -> None:
    chance = random.Random(4)
    whole = [make_record(chance, turn) for turn in range(50)]
    lost = [Record(turn=1, started_s=3.0, ended_s=30.0, completion_tokens=9, prompt_tokens=9, error="status 429")] * 2
    row = summarise("all", [*whole, *lost])
    assert (row["requests"], row["whole"], row["errors"]) == (52, 50, {"status 429": 2})
    assert row["first_token_ms_p50"] == pytest.approx(1000)
    gaps = sorted(gap for record in whole for gap in record.gaps_s)
    assert row["gap_ms_p50"] == pytest.approx(statistics.median_low(gaps) * 1e3)
    assert row["completion_tokens"] == sum(len(record.arrivals_s) for record in whole)
    span = 30.0 - min(record.started_s for record in whole)
    assert row["tokens_per_s"] == pytest.approx(row["completion_tokens"] / span)  # type: ignore[operator]
    shares = share_sources(whole)
    assert sum(shares.values()) == pytest.approx(1)
    assert row["host_share"] == shares["host_share"] > 0


def test_nothing_is_no_figure() -> None:
    row = summarise("all", [])
    assert row["requests"] == 0 and row["tokens_per_s"] == 0
    assert row["gap_ms_p99"] is None and row["host_share"] is None
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert count_errors([]) == {}
    one = Record(turn=0, started_s=0.0, ended_s=1.0, arrivals_s=(1.0,), completion_tokens=1)
    assert one.tokens_per_s is None and one.gaps_s == []

"""The overhead measurement: events are counted and matched as they came, and both servers send the same bytes."""

import asyncio
import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from bench.overhead import SETTLE_S, SLACK_S, Case, Listener, Window, ask, compare, describe, listen, read_pieces, start
from bench.paced import Pace
from tests.turns.clock import VirtualLoop, run_virtually


class NoTransport(asyncio.Transport):
    """Takes what is written."""

    def write(self, data: Any) -> None:
        """Nothing is done with it."""


def test_chunks_are_read() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"b\r\ndata: one\n\n\r\nc\r\ndata: three\n\r\n1\r\n\n"
    assert read_pieces(head + body) == ["data: one\n\n", "data: three\n"]  # the last chunk is not whole
    assert read_pieces(head + body + b"\r\n") == ["data: one\n\n", "data: three\n", "\n"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_events_are_counted_however_they_are_cut(size: int) -> None:
    listener = Listener("x", b"")
    listener.connection_made(NoTransport())
    data = b"".join(b"data: %d\n\n" % i for i in range(12))
    for place in range(0, len(data), size):
        listener.data_received(data[place : place + size])
    assert len(listener.arrivals_s) == 12
    assert listener.received == data


def test_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps come at their rate on average, though timers count milliseconds and the work between them takes time."""
    woke_s = run_virtually(lambda: keep_pace(monkeypatch))
    assert list(woke_s) == sorted(woke_s) and len(woke_s) == 40
    assert woke_s[-1] - woke_s[9] == pytest.approx(30 * 0.0025, abs=0.002), "it catches up in its first steps"


async def keep_pace(monkeypatch: pytest.MonkeyPatch) -> deque[float]:
    """When forty steps came back: a timer is up to a millisecond late, and each step's work takes half of one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    monkeypatch.setattr("bench.paced.time", SimpleNamespace(monotonic=loop.time))
    pace = Pace(0.0025)
    for number in range(40):
        await pace.wait()
        loop.now_s += 0.0005 + number % 3 * 0.0005
    return pace.woke_s


def test_ratios() -> None:
    case = Case(streams=2, tokens_per_s=10, tokens_per_step=1)
    node = Window(cpu_s=0.4, wall_s=2.0, events=4000, latencies_s=[0.001] * 98 + [0.01, 0.02])
    bare = Window(cpu_s=0.2, wall_s=2.0, events=4000, latencies_s=[0.0005] * 100)
    row = describe(case, 0.01, 20.0, [(node, bare)] * 3)
    assert row["cpu_ratio"] == pytest.approx(2.0) and row["net_ratio"] == pytest.approx(80 / 50)
    assert row["node_cpu_share"] == pytest.approx(0.2) and row["bare_event_us"] == pytest.approx(50)
    assert row["node_p50_ms"] == pytest.approx(1) and row["node_p99_ms"] == pytest.approx(10)


@pytest.mark.full
async def test_both_send_the_same() -> None:
    """What the bare server plays is what the node sent, byte for byte, and latencies are of the same events."""
    case = Case(streams=3, tokens_per_s=200, tokens_per_step=2)
    lasting_s = 2 * SETTLE_S + 1.0 + SLACK_S
    with start("node", case, lasting_s) as node, start("bare", case, lasting_s) as bare:
        _, recorded = await listen(node, [ask(case, lasting_s)] * 3, 1.0)
        pieces = [read_pieces(bytes(stream.received)) for stream in recorded]
        window, played = await listen(bare, [json.dumps(part).encode() for part in pieces], 0.5)
    for theirs, mine in zip(pieces, played, strict=True):
        again = read_pieces(bytes(mine.received))
        assert again == theirs[: len(again)] and len(again) > 50
    assert all(-0.001 < latency_s < 1 for latency_s in window.latencies_s) and window.events > 50


@pytest.mark.full
async def test_comparison() -> None:
    row = await compare(Case(streams=2, tokens_per_s=100, tokens_per_step=1), 1.0, 1)
    assert 0.3 < row["cpu_ratio"] < 20  # type: ignore[operator]
    assert row["net_ratio"] < row["cpu_ratio"]  # type: ignore[operator]
    assert row["node_events_per_s"] == pytest.approx(200, rel=0.2)
    assert 0 < row["node_p50_ms"] < 500  # type: ignore[operator]

"""Traces of turns as a collector gets them."""

import socket
import time

import pytest

from dsuf.errors import CommandError
from dsuf.observe import traces as module
from dsuf.observe.traces import Passage, Traces, TurnTrace
from tests.observe.collector import collecting, read_attributes

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}"


def make_turn(headers: dict[str, str] | None = None, failure: str | None = None) -> TurnTrace:
    """A turn that took two seconds, half of them queued."""
    now_s = time.monotonic()
    parts = [Passage("queued", now_s - 2, now_s - 1), Passage("decode", now_s - 1, now_s)]
    return TurnTrace(
        whole=Passage("POST /v1/messages", now_s - 2, now_s), parts=parts, attributes={"dsuf.turn": "t", "n": 3},
        headers=headers or {}, failure=failure,
    )  # fmt: skip


def test_a_turn_arrives_with_its_parts() -> None:
    with collecting() as collector:
        traces = Traces(collector.url, share=1.0, node="a", version="1.2")
        traces.record(make_turn(failure="EngineFailed"))
        traces.close()
    whole = next(span for span in collector.spans if not span.parent_span_id)
    parts = sorted(
        (span for span in collector.spans if span.parent_span_id), key=lambda span: span.start_time_unix_nano
    )
    assert [part.name for part in parts] == ["queued", "decode"] and whole.name == "POST /v1/messages"
    assert {part.parent_span_id for part in parts} == {whole.span_id} and len(
        {s.trace_id for s in collector.spans}
    ) == 1
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (
        parts[0].start_time_unix_nano, parts[1].end_time_unix_nano,
    )  # fmt: skip
    assert abs(whole.end_time_unix_nano / 1e9 - time.time()) < 5 and whole.kind == 2  # a server's span
    assert 1.99 < (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9 < 2.01
    assert read_attributes(whole) == {"dsuf.turn": "t", "n": 3} and whole.status.message == "EngineFailed"
    names = collector.resources[0]
    assert (names["service.name"], names["service.instance.id"], names["service.version"]) == ("dsuf", "a", "1.2")


def test_a_caller_is_the_parent_and_says_whether_to_trace() -> None:
    with collecting() as collector:
        traces = Traces(collector.url, share=0.0, node="", version="1")
        for headers in ({"traceparent": PARENT.format(flags="01")}, {"traceparent": PARENT.format(flags="00")},
                        {"traceparent": "nonsense"}, {}):  # fmt: skip
            traces.record(make_turn(headers))
        traces.close()
    assert len(collector.spans) == 3
    assert {span.trace_id.hex() for span in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert sum(span.parent_span_id.hex() == "b7ad6b7169203331" for span in collector.spans) == 1


def test_a_share_of_the_turns_is_traced() -> None:
    with collecting() as collector:
        traces = Traces(collector.url, share=0.25, node="", version="1")
        for _ in range(400):
            traces.record(make_turn())
        traces.close()
    assert 60 < len({span.trace_id for span in collector.spans}) < 140


@pytest.mark.full
@pytest.mark.parametrize("listens", [True, False])
def test_a_collector_that_is_away_or_silent_holds_nobody_up(listens: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listens:
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        traces = Traces(url, share=1.0, node="", version="1")
        began_s = time.monotonic()
        for _ in range(3000):  # more than the library keeps
            traces.record(make_turn())
        assert time.monotonic() - began_s < 20
        began_s = time.monotonic()
        traces.close()
        assert time.monotonic() - began_s < 30


def test_the_library_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_OPENTELEMETRY", False)
    with pytest.raises(CommandError, match="opentelemetry-sdk"):
        Traces("http://x/v1/traces", share=1.0, node="", version="1")

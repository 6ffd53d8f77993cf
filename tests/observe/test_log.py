"""Log lines are JSON, carry no more than they are given, and never make the caller wait."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from io import StringIO

import pytest

from dsuf.observe import log
from dsuf.observe.log import LogWriter, log_event, start_logging


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Give the root logger back as it was."""
    root, own = logging.getLogger(), logging.getLogger("dsuf")
    before = root.handlers, root.level, own.level
    yield
    root.handlers, root.level, own.level = before
    logging.captureWarnings(False)


def read_lines(stream: StringIO) -> list[dict[str, object]]:
    """The decoded log."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.usefixtures("root_logger")
def test_one_json_line_a_record() -> None:
    stream = StringIO()
    writer = start_logging("info", stream)
    log_event("turn ended", turn="abc", total_s=0.25, reason="st\nop")
    log_event("not shown", level="debug")
    logging.getLogger("aiohttp.access").info("routine lines of other packages stay out")
    logging.getLogger("aiohttp.server").warning("but %s do not", "warnings")
    writer.close()
    first, second = read_lines(stream)
    assert first | {"time": ""} == {
        "time": "", "level": "info", "event": "turn ended", "turn": "abc", "total_s": 0.25, "reason": "st\nop"
    }  # fmt: skip
    assert str(first["time"]).endswith("+00:00")
    assert (second["logger"], second["event"]) == ("aiohttp.server", "but warnings do not")


@pytest.mark.usefixtures("root_logger")
def test_an_error_brings_its_traceback() -> None:
    stream = StringIO()
    writer = start_logging("error", stream)
    try:
        raise RuntimeError("deep inside")
    except RuntimeError as error:
        log_event("step failed", level="error", error=error, step=7)
    writer.close()
    (line,) = read_lines(stream)
    assert line["step"] == 7 and "RuntimeError: deep inside" in str(line["traceback"])


class Blocked(StringIO):
    """A stream behind a full pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def write(self, text: str) -> int:
        self.open.wait(30)
        return super().write(text)


def test_a_full_pipe_never_stops_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_QUEUE_RECORDS", 100)
    stream = Blocked()
    writer = LogWriter(stream)
    started_s = time.monotonic()
    for _ in range(500):
        writer.emit(logging.makeLogRecord({"msg": "x", "levelno": logging.INFO}))
    assert time.monotonic() - started_s < 20
    assert 390 <= writer.dropped <= 400
    stream.open.set()
    writer.close()
    assert len(stream.getvalue().splitlines()) == 500 - writer.dropped

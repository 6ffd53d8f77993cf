"""Logs: one JSON object a line on standard error.

Records go through a bounded queue to a writing thread, since a full pipe behind standard error must not stop the event
loop; what does not fit is dropped and counted. Third-party loggers and warnings take the same way.
"""

import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Field = str | int | float | bool | None

_QUEUE_RECORDS = 10_000
_logger = logging.getLogger("dsuf")


def log_event(event: str, *, level: Level = "info", error: BaseException | None = None, **fields: Field) -> None:
    """Log `event` (a few constant words) with `fields`; `turn` names the turn. Never pass prompt or reply text.

    `error` adds its traceback, for the log only.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    if _logger.isEnabledFor(number):
        _logger.log(number, event, exc_info=error, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, event, then the fields; other loggers add their name."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.name != _logger.name:
            line["logger"] = record.name
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class LogWriter(logging.Handler):
    """Takes records from any thread without ever waiting, and writes them to `stream` in a thread of its own.

    `close` writes what is queued, for at most `drain_s` seconds.
    """

    drain_s = 2.0

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="dsuf-log", daemon=True)
        self._thread.start()
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line. It is formatted here, because its arguments may change later."""
        if self._queue.qsize() >= _QUEUE_RECORDS:
            self.dropped += 1
            return
        try:
            self._queue.put(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(self.drain_s)
        super().close()

    def _write(self) -> None:
        """Write lines until told to end; a stream that is gone ends it too."""
        while (line := self._queue.get()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                return


def start_logging(level: Level, stream: TextIO | None = None) -> LogWriter:
    """Send all logs of the process to `stream` (standard error) from `level` on; close the writer at the end.

    Other packages' loggers start at `warning`: their routine lines could carry what clients sent.
    """
    writer = LogWriter(stream or sys.stderr)
    root = logging.getLogger()
    root.handlers = [writer]
    root.setLevel(logging.WARNING)
    _logger.setLevel(level.upper())
    logging.captureWarnings(True)
    return writer

"""The file of turn records: one JSON object a line, written by a thread of its own, readable by its owner alone."""

import os
import queue
import threading
import time
from pathlib import Path

import msgspec

from dsuf.errors import CommandError
from dsuf.observe.log import log_event
from dsuf.types import TurnRecord

LIMIT_BYTES = 1 << 30
"""After so much a node writes no more records, and says so."""
_QUEUE_RECORDS = 1000
_CLOSE_S = 5.0


class Records:
    """Writes records to a new file in `folder`; what cannot be written is dropped and told once.

    Raises `CommandError` if the file cannot be made.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = folder / f"turns-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.jsonl"
        self._left_bytes = limit_bytes
        self._queue: queue.Queue[TurnRecord | None] = queue.Queue(_QUEUE_RECORDS)
        self._told = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
        except OSError as error:
            raise CommandError(f"record_dir = {str(folder)!r}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._write, name="dsuf-records", daemon=True)
        self._thread.start()

    def put(self, record: TurnRecord) -> None:
        """Have `record` written; never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._tell("the disk does not keep up")

    def close(self) -> None:
        """Write what waits, for some seconds at most. Blocks."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        except queue.Full:
            pass

    def _write(self) -> None:
        """Write until told to end."""
        encoder = msgspec.json.Encoder()
        with self._file:
            while (record := self._queue.get()) is not None:
                line = encoder.encode(record) + b"\n"
                if len(line) > self._left_bytes:
                    self._tell(f"{self.path} is full")
                    continue
                try:
                    self._file.write(line)
                    self._left_bytes -= len(line)
                except OSError as error:
                    self._tell(f"{self.path}: {error.strerror}")

    def _tell(self, reason: str) -> None:
        """Log the first record that is lost."""
        if not self._told:
            self._told = True
            log_event("turn record lost", level="warning", reason=reason)

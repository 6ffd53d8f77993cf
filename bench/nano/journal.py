"""The log of a training: one JSON object a line in a file, and the same in short on the terminal."""

import json
import time
from pathlib import Path
from typing import IO


class Journal:
    """Appends lines; each is flushed, so that a run that was cut leaves all of them."""

    def __init__(self, path: Path | None) -> None:
        """Without a path, lines go to the terminal alone."""
        self._file: IO[str] | None = path.open("a") if path else None
        self._start = time.monotonic()

    def write(self, event: str, **values: object) -> None:
        """One line: what happened, seconds since the program's start, and its figures."""
        line = {"event": event, "at_s": round(time.monotonic() - self._start, 1)} | {
            name: _shorten(value) for name, value in values.items()
        }
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        print(" ".join(f"{k}={v}" if k != "event" else str(v) for k, v in line.items()), flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _shorten(value: object) -> object:
    """Floats to four digits, inside lists and mappings too."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _shorten(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shorten(inner) for inner in value]
    return value

"""A progress bar on a terminal; elsewhere a line every few seconds."""

import threading
import time
from typing import TextIO

_BAR_WIDTH = 30
_TERMINAL_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 3.0


class Progress:
    """Progress over `total` units, written to `stream`. `unit` is "B" for bytes, which are shown as GB, or a plural."""

    def __init__(self, label: str, total: int, stream: TextIO, unit: str = "B") -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._unit = unit
        self._done = 0
        self._lock = threading.Lock()
        self._terminal = stream.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._terminal else _LINE_INTERVAL_S
        self._started = time.monotonic()
        self._shown = self._started

    def advance(self, amount: int) -> None:
        """Count `amount` more units as done; any thread may call it."""
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._shown >= self._interval_s:
                self._shown = now
                self._show("")

    def clear(self) -> None:
        """Free the terminal's line for other output."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        """Show the final state and end the line."""
        self._show("\n" if self._terminal else "")

    def _show(self, end: str) -> None:
        line = describe(self._label, self._done, self._total, self._unit, time.monotonic() - self._started)
        self._stream.write(f"\r\x1b[K{line}{end}" if self._terminal else f"{line}\n")
        self._stream.flush()


def describe(label: str, done: int, total: int, unit: str, elapsed_s: float) -> str:
    """One line: a bar, per cent, amounts, and the rate so far."""
    part = min(1.0, done / total) if total else 1.0
    bar = ("#" * round(part * _BAR_WIDTH)).ljust(_BAR_WIDTH, ".")
    if unit == "B":
        rate = f", {done / elapsed_s / 1e9:.2f} GB/s" if elapsed_s > 0 else ""
        return f"{label} [{bar}] {part:4.0%} {done / 1e9:.2f} of {total / 1e9:.2f} GB{rate}"
    return f"{label} [{bar}] {part:4.0%} {done} of {total} {unit}"

"""What a node prints while it starts: a line a step with its time, then how to talk to it."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import dsuf
from dsuf.config import Settings
from dsuf.welcome import describe_use


class Startup:
    """Prints steps as they end. A reader of the output that has gone is not a reason to stop."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._started_s = time.monotonic()
        self._broken = False
        self.say(f"dsuf {dsuf.__version__}, an inference server for DeepSeek-V4.1-Flash")

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time the block and print its line; what the block adds to the list is shown beside the name."""
        started_s = time.monotonic()
        remarks: list[str] = []
        yield remarks
        self.say(f"  {name:<10} {time.monotonic() - started_s:6.2f} s  {', '.join(remarks)}".rstrip())

    def ready(self, url: str, settings: Settings, *, useful: bool = True) -> None:
        """The last line of the start, and how to talk to the server, where it answers clients."""
        examples = f"\n\n{describe_use(url, settings)}\n" if useful else ""
        self.say(f"ready in {time.monotonic() - self._started_s:.2f} s{examples}")

    def say(self, text: str) -> None:
        """Print `text`. Where that fails, so would all that follows: nothing is printed any more."""
        if self._broken:
            return
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            self._broken = True
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # what is buffered would fail again as Python ends

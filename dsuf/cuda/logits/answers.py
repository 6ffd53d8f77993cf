"""The masks that steps on the device ask for: a thread that looks for questions and writes the answers.

It touches pinned memory alone, never the device's interface, so that a device that waits for it can never be what it
waits for. A question is there when its step has drafted; the layers run while it is answered. A step that waits in
vain goes on after a time (`rules`), and the engine fails then, as it does when a mask cannot be made.
"""

import threading
import time
from collections.abc import Mapping

from dsuf.cuda.arena import Arena
from dsuf.cuda.logits.line import Expected, Line
from dsuf.cuda.logits.masking import Masking
from dsuf.errors import DeviceError, EngineFailed

POLL_S = 0.00005


class Answers:
    """Answers the questions of all pipelines."""

    def __init__(self, arena: Arena) -> None:
        self._lines = {"decode": Line(arena, "decode", first=False), "prefill": Line(arena, "prefill", first=True)}
        self._waking = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: Exception | None = None

    def expect(self, pipeline: str, step: int, maskings: Mapping[int, Masking]) -> None:
        """Step `step` of `pipeline` is about to be launched, and will ask for these masks by slot."""
        with self._waking:
            self._lines[pipeline].expect(Expected(step, maskings))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cuda-masks", daemon=True)
                self._thread.start()
            self._waking.notify()

    def check(self) -> None:
        """Raise `EngineFailed` or `DeviceError` if an answer could not be found, or came too late."""
        if self._failure is not None:
            raise EngineFailed(f"A mask could not be made: {self._failure}.")
        if self._thread is not None and any(line.late for line in self._lines.values()):
            raise DeviceError("a step did not get its masks in time")

    def close(self) -> None:
        """End the thread; nothing is asked any more."""
        with self._waking:
            self._closing = True
            self._waking.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        lines = tuple(self._lines.values())
        while self._wait():
            try:
                done = [line.go_on() for line in lines]
            except Exception as error:  # whatever it is, the device must not wait for it
                self._failure = error
            if self._failure is not None:
                for line in lines:
                    line.forgo()
            elif not any(done):
                time.sleep(POLL_S)

    def _wait(self) -> bool:
        """Sleep while nothing is asked; False at the end."""
        with self._waking:
            self._waking.wait_for(lambda: self._closing or any(line.waits for line in self._lines.values()))
            return not self._closing

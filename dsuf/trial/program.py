"""A child process with a log file."""

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsuf.errors import CommandError

_TAIL_LINES = 12
_COMPLAINTS = 6
_LINE_CHARACTERS = 400
_READ_BYTES = 65_536
_BEGUN = re.compile(r"ready in |dsh: |.*Ready to accept connections")
"""Lines that end what a node and Redis say while they start."""
_NOTE = re.compile(r'\{"time":"[^"]*","level":"(debug|info)"|\d+:[A-Z] .{24} [.*-] |\s*$')
"""Lines of a node and of Redis below a warning, and empty ones."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # before there is a child, which should do as little as it can


class Program:
    """`command` as a child process named `name`, whose output goes to `folder`/`name`.log. It can be started again.

    Where it is `tied`, the system kills it when the thread ends that started it, however that comes about.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, *,
        tied: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.command, self.log = name, list(command), folder / f"{name}.log"
        self._environ = None if environ is None else dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._tie = _tie if tied else None
        self._begins = 0  # where in the log, in bytes, its present run does

    @property
    def pid(self) -> int:
        """Its process; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Run it, in a process group of its own, so that Ctrl-C reaches it through us alone. Raises `CommandError`."""
        try:
            with self.log.open("ab") as log:
                self._begins = log.tell()
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ,
                    start_new_session=True, preexec_fn=self._tie,
                )  # fmt: skip
        except OSError as error:
            raise CommandError(f"{self.name}: {self.command[0]}: {error.strerror}") from error

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`."""
        try:
            return self._process is None or self._process.wait(seconds) is not None
        except subprocess.TimeoutExpired:
            return False

    def stop(self, seconds: float) -> None:
        """Have it end: politely, and after `seconds` by force."""
        self.send(signal.SIGTERM)
        if not self.wait(seconds):
            self.kill()

    def kill(self) -> None:
        """End it at once, whatever state it is in."""
        self.send(signal.SIGKILL)
        self.wait(10.0)

    def tail(self) -> str:
        """The end of its log, as far as it is of its present run."""
        return "\n".join(self._read()[-_TAIL_LINES:])

    def complaints(self) -> list[str]:
        """The last lines of its log that may say why it ended: warnings, errors, and what is no log line, behind what
        it said as it started.
        """
        lines = self._read()
        begun = max((number for number, line in enumerate(lines, start=1) if _BEGUN.match(line)), default=0)
        return [line[:_LINE_CHARACTERS] for line in lines[begun:] if not _NOTE.match(line)][-_COMPLAINTS:]

    def _read(self) -> list[str]:
        """The last lines of its present run."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._begins, log.seek(0, os.SEEK_END) - _READ_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []


def _tie() -> None:
    """Have this process killed when the thread that made it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_all(programs: Sequence[Program], seconds: float) -> None:
    """Have all end within `seconds`, in the order given, and by force what has not."""
    ends_s = time.monotonic() + seconds
    for program in programs:
        program.send(signal.SIGTERM)
    for program in programs:
        if not program.wait(max(0.0, ends_s - time.monotonic())):
            program.kill()

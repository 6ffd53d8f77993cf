"""A server of this checkout in a process of its own, as `bin/serve` starts it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dsuf.checkpoint.synthetic import ensure_embedded

ROOT = Path(__file__).parents[1]
STOP_S = 30.0


class Server(msgspec.Struct, frozen=True):
    """Where it answers, and its process."""

    url: str
    pid: int

    def resident_bytes(self) -> int:
        """Memory that the process has in use."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def count_files(self) -> int:
        """Files and sockets that it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def count_threads(self) -> int:
        """Its threads."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@contextmanager
def serve(log: Path, *arguments: str) -> Iterator[Server]:
    """Run `dsuf serve` with `arguments` on a free port; its log goes to `log`. SIGTERM must end it with exit code 0."""
    command = [sys.executable, "-m", "dsuf", "serve", "--port", "0", *arguments]
    found = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(found), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield Server(_read_url(process, log), process.pid)
        process.terminate()
        if code := process.wait(STOP_S):
            raise RuntimeError(f"the server ended with exit code {code}, see {log}")
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serve_noise(log: Path, *arguments: str) -> Iterator[Server]:
    """`serve` with random weights, whose replies are as long as they may be; the model is made beside `log`."""
    with serve(log, "--model", str(ensure_embedded(log.parent)), *arguments) as server:
        yield server


def _read_url(process: "subprocess.Popen[str]", log: Path) -> str:
    """The address that the server prints while it starts, once it has said that it is ready."""
    url, started_s = "", time.monotonic()
    assert process.stdout is not None
    for line in process.stdout:
        name, *rest = line.split() or [""]
        url = rest[-1] if name == "listening" else url
        if name == "ready":
            return url
    raise RuntimeError(f"the server ended after {time.monotonic() - started_s:.0f} s, see {log}")

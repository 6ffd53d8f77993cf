"""A real server in a process of its own, started as a user starts it: `bin/dsuf serve`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@contextmanager
def serve(log: Path, *arguments: str, **environment: str) -> Iterator[str]:
    """Run the server with `arguments`; yields its base URL once it is ready, its output goes to `log`.

    It uses the interpreter of the tests, so nothing is installed. SIGTERM must end it with exit code 0.
    """
    port = find_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSUF_") or "CACHE" in name}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [ROOT / "bin" / "dsuf", "serve", "--port", str(port), *arguments],
            env=clean | {"DSUF_NO_SETUP": "1", "DSUF_PYTHON": sys.executable} | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, log)
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@contextmanager
def serve_script(folder: Path, rules: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """The server with the scripted engine that follows `rules`."""
    script = folder / "script.json"
    script.write_text(json.dumps({"rules": rules}))
    with serve(folder / "server.log", "--engine", "scripted", "--script", str(script)) as url:
        yield url


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once GET /readyz answers 200; raises with the server's output if it ends or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"the server did not get ready (exit code {process.poll()}):\n{log.read_text()}")


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

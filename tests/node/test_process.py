"""The server as a process: signals, exit codes, and what is printed."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.node.rig import write_script

ROOT = Path(__file__).parents[2]
SLOW = {"reply": "one two three four five six seven eight nine ten", "step_s": 0.1}


class Process:
    """A running server; `output` collects what it printed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DSUF_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsuf", "serve", "--port", "0", *arguments],
            cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.output = ""
        self.url = ""

    def wait_ready(self) -> None:
        """Read the output up to the line that says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(r"http://\S+:\d+", line):
                self.url = self.url or found[0]
            if line.startswith("ready in"):
                return
        raise AssertionError(f"the server ended: {self.output}")

    def stream(self, text: str) -> http.client.HTTPResponse:
        """An open stream that answers `text`."""
        body = {"model": "deepseek-flash", "stream": True, "messages": [{"role": "user", "content": text}]}
        body |= {"thinking": {"type": "disabled"}}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        reply: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=20)
        return reply


@contextmanager
def serving(model: Path, folder: Path, rules: Sequence[dict[str, object]], *arguments: str) -> Iterator[Process]:
    """A ready server with a script."""
    script = write_script(folder, rules)
    process = Process(["--engine", "scripted", "--script", str(script), "--model", str(model), *arguments])
    try:
        process.wait_ready()
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def test_sigterm_in_mid_stream_cuts_nothing(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path, [SLOW]) as server:
        stream = server.stream("count")
        first = stream.read1(200)
        server.process.send_signal(signal.SIGTERM)
        everything = (first + stream.read()).decode()
        assert server.process.wait(10) == 0
    assert everything.endswith("data: [DONE]\n\n")
    for word in SLOW["reply"].split():  # type: ignore[attr-defined]
        assert word in everything


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_second_signal_does_not_wait(model_dir: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    with serving(model_dir, tmp_path, [{"reply": "word " * 900, "step_s": 0.1}]) as server:
        stream = server.stream("go")
        stream.read1(200)
        started_s = time.monotonic()
        server.process.send_signal(number)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert server.process.wait(10) == code
        assert time.monotonic() - started_s < 5
        with pytest.raises((OSError, http.client.IncompleteRead)):
            while stream.read1(1000):
                pass


def test_a_taken_port_is_one_line_and_exit_code_2(model_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "dsuf", "serve", "--port", str(port), "--model", str(model_dir)],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == ("", f"dsuf: cannot listen on 127.0.0.1 port {port}: the port is in use\n")

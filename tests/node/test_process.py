"""The server as a process: signals, exit codes, and what is printed."""

import http.client
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.node.process import ROOT, serving_script
from tests.node.rig import write_script

SLOW = {"reply": "one two three four five six seven eight nine ten", "step_s": 0.1}


def test_pitfall_18_sigterm_in_mid_stream_cuts_nothing(model_dir: Path, tmp_path: Path) -> None:
    with serving_script(model_dir, tmp_path, [SLOW]) as server:
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
    with serving_script(model_dir, tmp_path, [{"reply": "word " * 900, "step_s": 0.1}]) as server:
        stream = server.stream("go")
        stream.read1(200)
        started_s = time.monotonic()
        server.process.send_signal(number)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert server.process.wait(30) == code
        assert time.monotonic() - started_s < 30
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


def test_output_that_cannot_be_written_does_not_end_a_server(model_dir: Path, tmp_path: Path) -> None:
    script = str(write_script(tmp_path, []))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsuf", "serve", "--port", str(port), "--model", str(model_dir),
             "--engine", "scripted", "--script", script],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        wait_ready(port)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert all(line.startswith("{") for line in errors.splitlines()), errors


def wait_ready(port: int) -> None:
    """Ask until the server on `port` is ready."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("not ready in time")


def test_a_signal_while_loading_does_not_wait_for_the_weights(model_dir: Path) -> None:
    code = (
        "import sys, time; from dsuf import __main__; from dsuf.node import node; "
        "node.load_engine = lambda *args: time.sleep(60); "
        f"sys.exit(__main__.main(['serve', '--port', '0', '--model', {str(model_dir)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "listening" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()

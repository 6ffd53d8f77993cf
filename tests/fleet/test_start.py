"""How nodes of a fleet start: what cannot work is one line and exit code 2, what may come later they go on without."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.fleet.rig import find_ports, read_ready
from tests.kv.directory.redis_server import RedisServer, stopping
from tests.node.process import ROOT, Process
from tests.node.rig import write_script

pytestmark = [pytest.mark.needs_redis, pytest.mark.timeout(400)]
SECRET = "a secret of the fleet"
NOBODY = "redis://127.0.0.1:1/0"


def refuse(*flags: str) -> str:
    """What a node says that does not start; it says one line, and nothing before."""
    done = subprocess.run(
        [sys.executable, "-m", "dsuf", "serve", "--port", "0", "--control-port", "0", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done
    assert done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr


def test_what_cannot_work_is_one_line(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("abc\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refuse("--redis-url", NOBODY, "--peer-secret", SECRET, "--control-port", port)
        assert f"control_port = {port}: the port is in use" in said
    assert "at least 16" in refuse("--redis-url", NOBODY, "--peer-secret-file", str(short))
    assert "No such file" in refuse("--redis-url", NOBODY, "--peer-secret-file", str(tmp_path / "none"))
    assert "without redis_url" in refuse("--transport", "rdma")
    assert "redis_url" in refuse("--redis-url", "http://x", "--peer-secret", SECRET)


@pytest.mark.full
@pytest.mark.parametrize("redis", ["gone", "wrong password"])
async def test_without_redis_a_node_starts_and_says_so(model_dir: Path, tmp_path: Path, redis: str) -> None:
    """It answers, is ready, and tells what is wrong; a password never shows."""
    with stopping(server := RedisServer(tmp_path / "redis", "requirepass right")):
        url = NOBODY if redis == "gone" else f"redis://:wrong-word@127.0.0.1:{server.port}/0"
        script = write_script(tmp_path, [{"reply": "Hello."}])
        began_s = time.monotonic()
        node = Process(
            [
                "--engine", "scripted", "--script", str(script), "--model", str(model_dir), "--control-port", "0",
                "--redis-url", url, "--peer-secret", SECRET,
            ]
        )  # fmt: skip
        try:
            node.wait_ready()
            assert time.monotonic() - began_s < 200.0
            assert node.stream("Hi").read().endswith(b"data: [DONE]\n\n")
            said = await read_ready(node.url)
            assert said.startswith("200") and "degraded" in said and "wrong-word" not in said + node.output
            assert ("password" in said) == (redis == "wrong password"), said
        finally:
            node.process.kill()
            node.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_prints_one_url_and_ends_with_all_it_started(tmp_path: Path, number: signal.Signals) -> None:
    """`bin/fleet 2`, until a signal, even one that leaves it no time to clear away."""
    for name in ("redis-server", "haproxy"):
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"no {name} on this machine")
    port, clean = find_ports(), {name: value for name, value in os.environ.items() if not name.startswith("DSUF_")}
    script = write_script(tmp_path, [{"reply": "Hello."}])
    process = subprocess.Popen(
        [ROOT / "bin" / "fleet", "2", "--port", str(port), "--logs", str(tmp_path)],
        env=clean | {
            "DSUF_NO_SETUP": "1", "DSUF_PYTHON": sys.executable, "DSUF_ENGINE": "scripted", "DSUF_SCRIPT": str(script),
        },
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = iter(process.stdout)
        printed = "".join(next(lines) for _ in range(4))
        assert f"ready: http://127.0.0.1:{port}\n" in printed, printed
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as reply:
            assert reply.status == 200
        process.send_signal(number)
        assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
    finally:
        process.kill()
        process.wait()
    ends_s = time.monotonic() + (0.0 if number == signal.SIGTERM else 20.0)
    while left := [above for above in (0, 1, 2, 101, 102, 200) if listens(port + above)]:
        assert time.monotonic() < ends_s, left
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

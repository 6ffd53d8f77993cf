"""Real Redis servers of a test: started in a folder, killed, restarted, stopped for a time."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 40.0


class RedisServer:
    """A redis-server (or, with `sentinel`, one of its Sentinels) on a free port of the loopback interface.

    `config` are lines of its configuration. It keeps nothing on disk.
    """

    def __init__(self, folder: Path, *config: str, tls: bool = False, sentinel: bool = False, port: int = 0) -> None:
        if (program := shutil.which("redis-server")) is None:
            pytest.skip("no redis-server on this machine (apt-get install redis-server)")
        self.port = port or free_port()
        folder.mkdir(exist_ok=True)
        self._file = folder / f"{self.port}.conf"
        plain, secure = (0, self.port) if tls else (self.port, 0)
        lines = ["bind 127.0.0.1", f"port {plain}", f"dir {folder}", "logfile log", "daemonize no"]
        lines += [f"tls-port {secure}"] if tls else []
        lines += [] if sentinel else ["save ''", "appendonly no", "repl-diskless-sync-delay 0"]
        self._file.write_text("\n".join([*lines, *config]) + "\n")
        self._command = [program, str(self._file), *(["--sentinel"] if sentinel else [])]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, on the same port, with nothing in it; returns when it takes connections."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None and time.monotonic() < ends_s, f"redis-server at {self.port}"
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def pause(self) -> None:
        """Let it stand still."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def ask(self, *words: str, secret: str = "") -> str:
        """What redis-cli prints for a command."""
        login = ["-a", secret, "--no-auth-warning"] if secret else []
        command = ["redis-cli", "-p", str(self.port), *login, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=40).stdout.strip()


@contextlib.contextmanager
def stopping(*servers: RedisServer) -> Iterator[None]:
    """End servers afterwards."""
    try:
        yield
    finally:
        for server in servers:
            server.kill()


def free_port() -> int:
    """A port that nobody listens at, and the one that a cluster's node adds to it neither."""
    while True:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port > 50_000:
                continue
            with contextlib.suppress(OSError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port

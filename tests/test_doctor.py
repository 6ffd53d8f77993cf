"""`dsuf doctor`: each probe sees the difference that it reports."""

import socket
import threading
from pathlib import Path

import pytest

from dsuf import doctor
from dsuf.trial import fleet


def test_taken_port_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener on the default port turns the line into a note that names it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(
            doctor, "Settings", lambda: type("S", (), {"host": "127.0.0.1", "port": port, "control_port": 0})
        )
        assert doctor.probe_ports().state == "note"
        assert str(port) in doctor.probe_ports().text
    assert doctor.probe_ports().state == "ok"


@pytest.mark.parametrize(
    ("reply", "found"), [(b"+PONG\r\n", True), (b"-NOAUTH no\r\n", True), (b"HTTP/1.1 400\r\n", False)]
)
def test_redis_is_told_from_another_server(reply: bytes, found: bool) -> None:
    """Only what answers PING as Redis does counts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        assert doctor.answers_ping(listener.getsockname()) is found
        thread.join(5)


def test_nobody_answers() -> None:
    """A closed port is no Redis."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert not doctor.answers_ping(address)


def test_gpu_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed GPU is shown; none is missing, with what it is for."""
    monkeypatch.setattr(doctor, "run_tool", lambda *command: "NVIDIA H200, 143771 MiB, 580.82")
    assert doctor.probe_gpu() == doctor.Finding("ok", "NVIDIA H200, 143771 MiB, 580.82")
    monkeypatch.setattr(doctor, "run_tool", lambda *command: "")
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    assert doctor.probe_gpu().state == "missing"


def test_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base package that cannot be imported."""
    monkeypatch.setattr(doctor, "BASE_PACKAGES", ("msgspec", "no_such_package"))
    assert doctor.probe_packages().text == "not importable: no_such_package"


def test_cache_directory_need_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The nearest existing parent tells the disk."""
    monkeypatch.setenv("DSUF_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert str(tmp_path) in doctor.probe_cache().text


def test_tool_that_fails_is_no_tool(tmp_path: Path) -> None:
    """Missing and failing programs give an empty text."""
    assert doctor.run_tool(str(tmp_path / "missing")) == ""
    assert doctor.run_tool("false") == ""
    assert doctor.run_tool("echo", "x") == "x"


def test_the_balancer_is_shown_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is there and runs, one that does not run, none."""
    program = tmp_path / "haproxy"
    program.write_text("#!/bin/sh\necho HAProxy version 9\n")
    program.chmod(0o755)
    monkeypatch.setattr(fleet.shutil, "which", lambda name, path=None: str(program))
    assert doctor.probe_haproxy() == doctor.Finding("ok", f"{program}, HAProxy version 9")
    program.write_text("#!/bin/sh\nexit 1\n")
    assert doctor.probe_haproxy().state == "note"
    monkeypatch.setattr(fleet.shutil, "which", lambda name, path=None: None)
    assert doctor.probe_haproxy().state == "missing"

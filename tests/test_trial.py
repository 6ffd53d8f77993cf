"""A fleet to try: which processes there would be, how they start and end. No node runs here."""

import argparse
import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from dsuf.config import Settings
from dsuf.errors import CommandError, DeadlineExceeded, EngineFailed, Unavailable
from dsuf.trial import command, fleet, keeper
from dsuf.trial.balancer import TEXTS, describe_balancer
from dsuf.trial.command import Stopping, check, describe, watch
from dsuf.trial.fleet import TrialFleet, answers, find_program
from dsuf.trial.program import Program, stop_all
from dsuf.welcome import describe_use

NAP = [sys.executable, "-c", "import time; time.sleep(60)"]
DEAF = "import signal, time; signal.signal(15, lambda *_: 0); print('on', flush=True); time.sleep(60)"
STUBBORN = [sys.executable, "-c", DEAF]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis and balancer are installed, so to say, and the ports are free."""
    monkeypatch.setattr(fleet, "find_program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(command, "check_machine", lambda port, nodes: None)


def read_flags(program: Program) -> dict[str, str]:
    """The flags of a node's process."""
    words = program.command[4:]
    return dict(zip(words[::2], words[1::2], strict=True))


def make_args(**changes: object) -> argparse.Namespace:
    """What the command line gives."""
    return argparse.Namespace(**{"nodes": 3, "prefill": 0, "port": 8000, "strict": False, "logs": None} | changes)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DSUF_DRAFTS": "banana"}, "no node would start: drafts = 'banana'"),
        ({"DSUF_PEER_SECRET_FILE": "/x"}, "peer_secret_file gives it too"),
        ({"DSUF_TLS_CERT_FILE": "/x", "DSUF_TLS_KEY_FILE": "/y"}, "tls_cert_file: .* plain HTTP"),
    ],
)
def test_settings_with_which_no_fleet_comes_about(environ: dict[str, str], words: str) -> None:
    command.check_settings({})
    with pytest.raises(CommandError, match=words):
        command.check_settings(environ)


@pytest.mark.usefixtures("tools")
def test_nodes_differ_in_ports_and_names_alone(tmp_path: Path) -> None:
    trial = TrialFleet(3, tmp_path, port=9000, flags=("--threads", "1"))
    flags = [read_flags(node) for node in trial.nodes]
    assert [(f["--port"], f["--control-port"], f["--node-id"]) for f in flags] == [
        ("9001", "9101", "node1"), ("9002", "9102", "node2"), ("9003", "9103", "node3"),
    ]  # fmt: skip
    same = {name: {f[name] for f in flags} for name in ("--role", "--redis-url", "--host", "--threads")}
    assert same == {
        "--role": {"both"}, "--redis-url": {"redis://127.0.0.1:9200/0"}, "--host": {"127.0.0.1"}, "--threads": {"1"},
    }  # fmt: skip
    assert (trial.url, trial.node_url(2)) == ("http://127.0.0.1:9000", "http://127.0.0.1:9002")
    assert "9200" in trial.redis.command


@pytest.mark.usefixtures("tools")
def test_nodes_for_prompts_get_no_clients(tmp_path: Path) -> None:
    trial = TrialFleet(3, tmp_path, port=9000, prefill=1, own_flags=lambda n: ("--advertise", f"x:{n}"))
    assert [read_flags(node)["--role"] for node in trial.nodes] == ["prefill", "decode", "decode"]
    assert [read_flags(node)["--advertise"] for node in trial.nodes] == ["x:1", "x:2", "x:3"]
    config = (tmp_path / "haproxy.cfg").read_text()
    assert "bind 127.0.0.1:9000" in config
    assert [line.split()[2] for line in config.splitlines() if line.startswith("  server ")] == [
        "127.0.0.1:9002", "127.0.0.1:9003",
    ]  # fmt: skip


@pytest.mark.usefixtures("tools")
def test_the_secret_is_not_on_the_command_line(tmp_path: Path) -> None:
    """Where everybody on the machine could read it; each fleet has its own."""
    trial, other = (TrialFleet(1, tmp_path, port=9000) for _ in range(2))
    assert trial.secret != other.secret
    assert not any(trial.secret in word for program in trial.programs for word in program.command)
    assert trial.nodes[0]._environ is not None
    assert trial.nodes[0]._environ["DSUF_PEER_SECRET"] == trial.secret


@pytest.mark.usefixtures("tools")
def test_a_fleet_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    trial = TrialFleet(2, tmp_path, port=9000)
    trial.redis.command, trial.nodes[0].command = NAP, NAP
    trial.nodes[1].command = [sys.executable, "-c", "print('no such model'); raise SystemExit(2)"]
    trial.wait_ready = lambda number, seconds=5.0: (  # type: ignore[method-assign, misc, assignment]
        None if number == 1 else TrialFleet.wait_ready(trial, number, seconds)
    )
    with pytest.raises(CommandError, match="node2 ended with code 2:\nno such model"):
        trial.start()
    assert [program.code is not None for program in (trial.redis, *trial.nodes)] == [True] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, "1 to 64"), ({"nodes": 65}, "1 to 64"), ({"nodes": 2, "prefill": 2}, "--prefill 2"),
        ({"prefill": -1}, "--prefill -1"), ({"port": 80}, "--port 80"), ({"port": 65_500}, "--port 65500"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    check(make_args())
    with pytest.raises(CommandError, match=words):
        check(make_args(**changes))


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(CommandError, match="apt-get install"):
        find_program("no-such-program-anywhere")


@pytest.mark.usefixtures("tools")
def test_the_command_ends_with_what_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = TrialFleet(1, tmp_path, port=9000)
    trial.nodes[0].command = [sys.executable, "-c", "print('last words'); raise SystemExit(3)"]
    trial.nodes[0].start()
    with signals_kept():
        stopping = Stopping(trial)
        stopping.starting = False
        assert watch(trial, stopping, strict=True) == 1
        assert capsys.readouterr().out == "node1 ended with code 3\n  last words\n"


@pytest.mark.usefixtures("tools")
def test_a_node_that_is_killed_starts_again_and_the_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same place, until a signal comes."""
    trial = TrialFleet(2, tmp_path, port=9000)
    monkeypatch.setattr(trial, "is_ready", lambda number: True)
    trial.nodes[0].command = NAP
    trial.nodes[0].start()
    first = trial.nodes[0].pid
    trial.nodes[0].kill()
    with signals_kept():
        stopping = Stopping(trial)
        stopping.starting = False
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            if "again" in said[-1] and "ready" in said[-1]:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(command, "say", say)
        try:
            assert watch(trial, stopping, strict=False) == 130
            assert trial.nodes[0].code is None and trial.nodes[0].pid != first
        finally:
            trial.nodes[0].kill()
    assert said == ["node1 ended with signal 9 (Killed); it starts again in 1 s", "node1 is ready again"]


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("what", ["the balancer", "all that answer"])
def test_the_command_ends_with_what_it_cannot_be_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A node that computes prompts for others is not enough to go on."""
    trial = TrialFleet(2, tmp_path, port=9000, prefill=1)
    ended = trial.balancer if what == "the balancer" else trial.nodes[1]
    ended.command = ["/bin/false"]
    ended.start()
    assert ended.wait(20.0)
    monkeypatch.setattr(keeper, "MOST_STARTS", 0)
    monkeypatch.setattr(trial, "is_ready", lambda number: True)
    said: list[str] = []
    monkeypatch.setattr(command, "say", said.append)
    assert watch(trial, SimpleNamespace(asked=False), strict=False) == 1  # type: ignore[arg-type]
    assert [line.split(";")[0] for line in said] == [f"{ended.name} ended with code 1"]


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("keys", [(), ("sk-secret",)])
def test_the_fleet_is_used_as_one_server_is(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """The same lines as a server's own, with the balancer's address."""
    trial, settings = TrialFleet(1, tmp_path, port=9000), Settings(api_keys=keys)
    said = describe(trial, settings)
    assert f"\n\n{describe_use(trial.url, settings)}\n" in said and trial.node_url(1) in said


def test_a_port_in_use_is_all_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is made before."""
    monkeypatch.setattr(command, "find_program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fleet, "can_bind", lambda host, port: port != 9101)
    with pytest.raises(CommandError, match="port 9101 is in use"):
        command.run(make_args(port=9000))
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """What handles signals is as before afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.usefixtures("tools")
def test_a_signal_while_it_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, whatever is not ready yet; with the signal's code."""
    ended: list[str] = []

    def start(self: TrialFleet, tell: object) -> None:
        try:
            self.nodes[0].command = NAP
            self.nodes[0].start()
            signal.raise_signal(signal.SIGINT)
            time.sleep(60)
        finally:
            self.stop(5.0)
            ended.append(str(self.nodes[0].code))

    monkeypatch.setattr(TrialFleet, "start", start)
    with signals_kept():
        assert command.run(make_args(logs=tmp_path / "logs", port=9000)) == 130
    assert ended == [str(-signal.SIGTERM)]


@pytest.mark.usefixtures("tools")
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """Who takes long to end is killed."""
    trial = TrialFleet(1, tmp_path, port=9000)
    trial.nodes[0].command = STUBBORN
    trial.nodes[0].start()
    while "on" not in trial.nodes[0].tail():
        time.sleep(0.01)
    with signals_kept():
        Stopping(trial).starting = False
        signal.raise_signal(signal.SIGINT)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began_s = time.monotonic()
        trial.stop()
        assert time.monotonic() - began_s < 10.0
    assert trial.nodes[0].code == -signal.SIGKILL


def test_the_command_stops_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where waiting for the end fails."""
    done: list[str] = []

    class Fake:
        url = "http://x"

        def __init__(self, *args: object, **options: object) -> None: ...
        def start(self, tell: object) -> None:
            done.append("start")

        def node_url(self, number: int) -> str:
            return "http://y"

        def stop(self) -> None:
            done.append("stop")

    def fail(*args: object, **options: object) -> int:
        raise RuntimeError("planned")

    monkeypatch.setattr(command, "check_machine", lambda port, nodes: None)
    monkeypatch.setattr(command, "TrialFleet", Fake)
    monkeypatch.setattr(command, "Stopping", lambda fleet: SimpleNamespace())
    monkeypatch.setattr(command, "watch", fail)
    with pytest.raises(RuntimeError, match="planned"):
        command.run(make_args(logs=tmp_path / "logs"))
    assert done == ["start", "stop"]


def test_a_program_ends_politely_or_by_force(tmp_path: Path) -> None:
    polite, stubborn = Program("polite", NAP, tmp_path), Program("stubborn", STUBBORN, tmp_path)
    assert (polite.pid, polite.code) == (0, None)
    for program in (polite, stubborn):
        program.start()
        assert program.pid and program.code is None
    while "on" not in stubborn.tail():
        time.sleep(0.01)
    began_s = time.monotonic()
    stop_all([polite, stubborn], 0.3)
    assert time.monotonic() - began_s < 20.0
    assert (polite.code, stubborn.code) == (-signal.SIGTERM, -signal.SIGKILL)
    polite.stop(1.0)  # nothing to do
    polite.start()
    assert polite.code is None
    polite.stop(5.0)
    assert polite.code == -signal.SIGTERM


def test_a_frozen_program_can_be_killed(tmp_path: Path) -> None:
    program = Program("frozen", NAP, tmp_path)
    program.start()
    program.send(signal.SIGSTOP)
    assert not program.wait(0.05)
    program.kill()
    assert program.code == -signal.SIGKILL


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="balancer: /no/such/program: No such file"):
        Program("balancer", ["/no/such/program"], tmp_path).start()
    assert Program("x", NAP, tmp_path).tail() == ""


def test_nobody_answers_where_nobody_listens() -> None:
    assert not answers(1, "/readyz")


def test_what_is_tied_ends_with_who_started_it_however_that_ends(tmp_path: Path) -> None:
    """The one that started it is killed, and has no chance to clear away."""
    text = """
import sys, time
from pathlib import Path
from dsuf.trial.program import Program
napping = [sys.executable, "-c", "import time; time.sleep(60)"]
programs = [Program(str(tied), napping, Path(sys.argv[1]), tied=tied) for tied in (True, False)]
for program in programs:
    program.start()
print(*[program.pid for program in programs], flush=True)
time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    tied, loose = map(int, starter.stdout.readline().split())
    try:
        assert is_running(tied)
        starter.kill()
        starter.wait()
        ends_s = time.monotonic() + 10.0
        while is_running(tied):
            assert time.monotonic() < ends_s, "it goes on"
            time.sleep(0.01)
        assert is_running(loose)
    finally:
        os.kill(loose, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether there is such a process, which has not ended and waits for nobody to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def balance(folder: Path, server: str) -> Iterator[int]:
    """The balancer runs before `server`; its port. Skips where it is not installed."""
    try:
        haproxy = find_program("haproxy")
    except CommandError as error:
        pytest.skip(str(error))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = folder / "haproxy.cfg"
    config.write_text(describe_balancer("127.0.0.1", port, [server]))
    program = Program("balancer", [haproxy, "-db", "-f", str(config)], folder)
    program.start()
    try:
        ends_s = time.monotonic() + 20.0
        while not listens(port):
            assert program.code is None and time.monotonic() < ends_s, program.tail()
            time.sleep(0.02)
        yield port
    finally:
        program.kill()


def ask(port: int, path: str) -> http.client.HTTPResponse:
    """What is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse()


def test_what_the_balancer_says_itself_is_an_error_of_the_protocol(tmp_path: Path) -> None:
    """No node is there."""
    with balance(tmp_path, "nobody 127.0.0.1:1") as port:
        reply = ask(port, "/v1/models")
        said = json.loads(reply.read())["error"]
        assert (reply.status, reply.headers["content-type"], reply.headers["retry-after"]) == (
            503, "application/json", "1",
        )  # fmt: skip
        assert (said["type"], said["message"]) == TEXTS[503]
        assert set(said) == {"message", "type", "param", "code"}


class Answers(http.server.BaseHTTPRequestHandler):
    """A node, as far as a balancer sees it: `failing` is what it says of itself, `late_s` how long that takes, a stream
    ends when it is `over`."""

    protocol_version = "HTTP/1.1"
    failing: ClassVar[list[str]] = []
    late_s: ClassVar[float] = 0.0
    over: ClassVar[threading.Event]

    def do_GET(self) -> None:
        """Readiness, or a stream of some pieces a second."""
        if self.path == "/readyz":
            time.sleep(self.late_s)
            body = json.dumps({"ready": not self.failing, "failing": self.failing}).encode()
            self.send_response(503 if self.failing else 200)
            self.send_header("Content-Length", str(len(body)))
            with contextlib.suppress(OSError):  # the balancer does not always wait for it
                self.end_headers()
                self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.over.wait(0.05):
                self.wfile.write(b"1\r\nx\r\n")
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(("failing", "whole"), [("draining", True), ("engine: no step finished", False)])
def test_streams_of_a_node_that_drains_go_on_and_nothing_new_comes_to_it(
    tmp_path: Path, failing: str, whole: bool
) -> None:
    """Those of a node that is stuck are broken off, so that clients can go on elsewhere."""
    with stream_from_a_node(tmp_path) as (stream, port):
        Answers.failing = [failing]
        ends_s = time.monotonic() + 20.0
        while not says_itself(port):
            assert time.monotonic() < ends_s
            time.sleep(0.1)
        if whole:
            assert stream.read(10) == 10 * b"x"
            Answers.over.set()
            assert not stream.read().strip(b"x"), "it ends as it should"
        else:
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                stream.read()


@pytest.mark.full
@pytest.mark.parametrize("late_s", [1.0, 60.0])
def test_streams_of_a_node_that_is_late_go_on_and_those_of_a_silent_one_end(tmp_path: Path, late_s: float) -> None:
    """A loop that stands still for a second under load is no reason to break off what it serves."""
    with stream_from_a_node(tmp_path) as (stream, port):
        Answers.late_s = late_s
        if late_s < 3.0:
            ends_s = time.monotonic() + 6.0
            while time.monotonic() < ends_s:
                assert stream.read(10) == 10 * b"x"
            assert ask(port, "/stream").status == 200, "it gets new ones, too"
            Answers.over.set()
            assert not stream.read().strip(b"x"), "it ends as it should"
        else:
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                stream.read()


@contextlib.contextmanager
def stream_from_a_node(folder: Path) -> Iterator[tuple[http.client.HTTPResponse, int]]:
    """A stream that a node began through the balancer, and the balancer's port."""
    Answers.failing, Answers.late_s, Answers.over = [], 0.0, threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as node:
        node.daemon_threads, node.block_on_close = True, False
        threading.Thread(target=node.serve_forever, args=(0.05,), daemon=True).start()
        try:
            with balance(folder, f"node 127.0.0.1:{node.server_address[1]}") as port:
                while (stream := ask(port, "/stream")).status != 200:
                    time.sleep(0.1)
                assert stream.read(1) == b"x"
                yield stream, port
        finally:
            Answers.over.set()
            node.shutdown()


def says_itself(port: int) -> bool:
    """Whether the balancer answers, since there is no node for anything new."""
    try:
        return ask(port, "/readyz").headers["retry-after"] is not None
    except ConnectionError:  # it was broken off too
        return False


def listens(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_errors_of_the_balancer_are_those_of_nodes() -> None:
    """Types by status, as nodes have them."""
    kinds = {kind.status: kind.type for kind in (Unavailable, EngineFailed, DeadlineExceeded)}
    assert {status: TEXTS[status][0] for status in kinds} == kinds

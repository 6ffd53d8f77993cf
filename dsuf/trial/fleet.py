"""N nodes, Redis and a balancer on loopback."""

import http.client
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsuf.errors import CommandError
from dsuf.trial.balancer import describe_balancer
from dsuf.trial.ports import can_bind
from dsuf.trial.program import Program, stop_all

HOST = "127.0.0.1"
START_S = 180.0
STOP_S = 75.0
CONTROL_ABOVE = 100
"""How far a node's control port is above its HTTP port: 8001 and 8101, as documented."""


class TrialFleet:
    """`count` nodes behind a balancer on `port`, the first `prefill` of them for prompts alone. Settings of all
    nodes come from the environment and `flags`, those of node `number` alone from `own_flags` and `own_environ`; what
    they print is in `folder`. Where they are `tied`, they are killed when the thread that started them ends.
    """

    def __init__(
        self, count: int, folder: Path, *, port: int = 8000, prefill: int = 0, flags: Sequence[str] = (),
        own_flags: Callable[[int], Sequence[str]] = lambda number: (),
        own_environ: Callable[[int], Mapping[str, str]] = lambda number: {}, tied: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.port, self.prefill, self._tied = folder, port, prefill, tied
        redis, balancer = find_program("redis-server"), find_program("haproxy")
        self.redis_port = port + 2 * CONTROL_ABOVE
        self.secret = secrets.token_hex(16)
        self.nodes = [
            self._node(number, (*flags, *own_flags(number)), own_environ(number), count)
            for number in range(1, count + 1)
        ]
        listen = ["--bind", HOST, "--port", str(self.redis_port), "--dir", str(folder)]
        self.redis = Program("redis", [redis, *listen, "--save", "", "--appendonly", "no"], folder, tied=tied)
        config = folder / "haproxy.cfg"
        config.write_text(describe_balancer(HOST, port, self._servers()))
        self.balancer = Program("balancer", [balancer, "-db", "-f", str(config)], folder, tied=tied)

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"http://{HOST}:{self.port}"

    @property
    def programs(self) -> list[Program]:
        """All of it, in the order in which it should end."""
        return [self.balancer, *self.nodes, self.redis]

    @property
    def answering(self) -> list[Program]:
        """The nodes that clients reach."""
        return self.nodes[self.prefill :]

    def node_url(self, number: int) -> str:
        """Node `number`, from 1 on, past the balancer."""
        return f"http://{HOST}:{self.port + number}"

    def start(self, tell: Callable[[str], None] = lambda text: None, seconds: float = START_S) -> None:
        """Start everything and wait until all nodes are ready; raises `CommandError`, with nothing left running."""
        check_ports(self.port, len(self.nodes))
        try:
            self.redis.start()
            for node in self.nodes:
                node.start()
            for number, node in enumerate(self.nodes, start=1):
                self.wait_ready(number, seconds)
                tell(f"{node.name} ready at {self.node_url(number)}, process {node.pid}")
            self.balancer.start()
            self._wait(lambda: answers(self.port, "/readyz"), self.balancer, seconds)
        except BaseException:
            self.stop(5.0)
            raise

    def is_ready(self, number: int) -> bool:
        """Whether node `number` says that it is."""
        return answers(self.port + number, "/readyz")

    def wait_ready(self, number: int, seconds: float = START_S) -> None:
        """Wait until node `number` says that it is ready; raises `CommandError`."""
        self._wait(lambda: self.is_ready(number), self.nodes[number - 1], seconds)

    def find_ended(self) -> list[Program]:
        """What has ended by itself."""
        return [program for program in self.programs if program.code is not None]

    def stop(self, seconds: float = STOP_S) -> None:
        """End everything: nobody new gets in, the nodes drain beside each other, then balancer and Redis go."""
        self.balancer.send(signal.SIGUSR1)
        stop_all(self.nodes, seconds)
        stop_all([self.balancer], 5.0)
        stop_all([self.redis], 5.0)

    def _node(self, number: int, flags: Sequence[str], environ: Mapping[str, str], count: int) -> Program:
        """The process of one node."""
        port = self.port + number
        role = "both" if not self.prefill else "prefill" if number <= self.prefill else "decode"
        if self.prefill >= count:
            raise CommandError(f"{self.prefill} of {count} nodes for prompts leave none to answer clients")
        environ = os.environ | {"DSUF_PEER_SECRET": self.secret} | dict(environ)
        own = {
            "host": HOST, "port": port, "control-port": port + CONTROL_ABOVE, "node-id": f"node{number}", "role": role,
            "redis-url": f"redis://{HOST}:{self.redis_port}/0",
        }  # fmt: skip
        listed = [text for name, value in own.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "dsuf", "serve", *listed, *flags]
        return Program(f"node{number}", command, self.folder, environ, tied=self._tied)

    def _servers(self) -> list[str]:
        """Names and addresses of the nodes that answer clients."""
        answering = range(self.prefill + 1, len(self.nodes) + 1)
        return [f"node{number} {HOST}:{self.port + number}" for number in answering]

    def _wait(self, ready: Callable[[], bool], program: Program, seconds: float) -> None:
        """Wait until `ready`; raises `CommandError` where `program` ends before, or does not become so."""
        ends_s = time.monotonic() + seconds
        while not ready():
            if program.code is not None:
                raise CommandError(f"{program.name} ended with code {program.code}:\n{program.tail()}")
            if time.monotonic() > ends_s:
                raise CommandError(f"{program.name} was not ready within {seconds:.0f} s:\n{program.tail()}")
            time.sleep(0.1)


def check_ports(port: int, count: int) -> None:
    """Raise `CommandError` where something listens already on a port of a fleet, which would answer in our place."""
    own = range(port, port + count + 1)
    for number in (*own, *(other + CONTROL_ABOVE for other in own[1:]), port + 2 * CONTROL_ABOVE):
        if not can_bind(HOST, number):
            raise CommandError(f"port {number} is in use: a fleet takes {describe_ports(port, count)}")


def describe_ports(port: int, count: int) -> str:
    """The ports of a fleet: balancer and nodes, nodes for each other, Redis."""
    first = port + CONTROL_ABOVE
    return f"{port} to {port + count}, {first + 1} to {first + count} and {port + 2 * CONTROL_ABOVE}"


def find_program(name: str) -> str:
    """Where `name` is installed; raises `CommandError` that says how to get it."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if path is None:
        raise CommandError(
            f"no {name} on this machine: install it (Debian, Ubuntu: apt-get install redis-server haproxy)"
        )
    return path


def answers(port: int, path: str) -> bool:
    """Whether a GET of `path` is answered with 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

"""A network of its own for each node of a test: namespaces at a bridge, whose cables can be slow or pulled out."""

import ctypes
import http.client
import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

_NEWNET = 0x40000000
HUB = 254
"""The bridge's own place."""


class NotAllowed(Exception):
    """This machine makes no namespaces for us."""


class Network:
    """Places 1 to `count` with the addresses 10.99.0.1 and on, and the hub. Use within `with`."""

    def __init__(self, count: int) -> None:
        self._name, self._count = f"dsuf-{secrets.token_hex(3)}", count

    def __enter__(self) -> "Network":
        """Raises `NotAllowed`."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise NotAllowed("no ip and tc (apt-get install iproute2)")
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NotAllowed(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        for place in (*range(1, self._count + 1), HUB):
            subprocess.run(["ip", "netns", "del", self.name(place)], capture_output=True, check=False)

    def name(self, place: int) -> str:
        """The namespace of a place."""
        return f"{self._name}-{place}"

    def address(self, place: int) -> str:
        """Where others reach it."""
        return f"10.99.0.{place}"

    def within(self, place: int) -> list[str]:
        """What goes before a command that is to run there."""
        return ["ip", "netns", "exec", self.name(place)]

    def slow_down(self, place: int, rate: str) -> None:
        """What leaves `place` takes its time; `rate` as tc has it."""
        _run("ip", "netns", "exec", self.name(place), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate,
             "burst", "8kb", "latency", "10s")  # fmt: skip

    def speed_up(self, place: int) -> None:
        """As fast as it goes."""
        _run("ip", "netns", "exec", self.name(place), "tc", "qdisc", "del", "dev", "eth0", "root")

    def split(self, place: int) -> None:
        """Nothing passes between `place` and the others, and nobody is told."""
        _run("ip", "-n", self.name(HUB), "link", "set", f"v{place}", "nomaster")

    def join(self, place: int) -> None:
        """It does again."""
        _run("ip", "-n", self.name(HUB), "link", "set", f"v{place}", "master", "br0")

    def ask(self, place: int, port: int, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of what a server on `place` answers a client there; it takes a thread of its own."""
        found: Future[tuple[int, Any]] = Future()

        def work() -> None:
            try:
                found.set_result(talk())
            except Exception as error:
                found.set_exception(error)

        def talk() -> tuple[int, Any]:
            with open(f"/run/netns/{self.name(place)}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
            method = "GET" if body is None else "POST"
            connection.request(method, path, json.dumps(body or {}), {"content-type": "application/json"})
            reply = connection.getresponse()
            with reply:
                return reply.status, json.load(reply)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found.result()

    def _build(self) -> None:
        hub = self.name(HUB)
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "set", "lo", "up")
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "addr", "add", f"{self.address(HUB)}/24", "dev", "br0")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        for place in range(1, self._count + 1):
            own = self.name(place)
            _run("ip", "netns", "add", own)
            _run("ip", "-n", hub, "link", "add", f"v{place}", "type", "veth", "peer", "name", "eth0", "netns", own)
            _run("ip", "-n", hub, "link", "set", f"v{place}", "master", "br0", "up")
            _run("ip", "-n", own, "addr", "add", f"{self.address(place)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", own, "link", "set", device, "up")


def _run(*command: str) -> None:
    """Run a command; raises `subprocess.CalledProcessError`."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)

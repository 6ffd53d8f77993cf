"""Try a fleet on this machine: N nodes, Redis and a balancer on loopback, until Ctrl-C.

What ends by itself, or is killed to see what happens, starts again after a second; what goes on ending stays away.
Needs redis-server and haproxy. Settings of all nodes come from the environment: `DSUF_DRAFTS=5 bin/fleet 3`.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType

from dsuf.config import Settings, find_file, load_settings
from dsuf.errors import CommandError
from dsuf.trial.fleet import CONTROL_ABOVE, HOST, TrialFleet, check_ports, find_program
from dsuf.trial.keeper import Keeper, describe_end
from dsuf.trial.ports import can_bind
from dsuf.welcome import describe_use

MOST_NODES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsuf fleet`."""
    parser.add_argument("nodes", metavar="N", type=int, help=f"how many nodes, 1 to {MOST_NODES}")
    parser.add_argument(
        "--prefill", metavar="M", type=int, default=0, help="M of them only compute prompts (default: 0)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="the balancer's; nodes take those above it, and those 100 and 200 above (default: 8000)",
    )
    parser.add_argument(
        "--logs", metavar="DIR", type=Path, help="where output goes, and stays (default: a new folder under /tmp)"
    )
    parser.add_argument("--strict", action="store_true", help="end with the first thing that ends by itself")


def run(args: argparse.Namespace) -> int:
    """Run the fleet until a signal comes, or until it cannot go on; raises `CommandError`."""
    check(args)
    settings = check_settings(os.environ)
    check_machine(args.port, args.nodes)
    folder = make_folder(args.logs)
    fleet = TrialFleet(args.nodes, folder, port=args.port, prefill=args.prefill, tied=True)
    stopping = Stopping(fleet)
    say(f"{args.nodes} nodes, Redis and a balancer; their output: {folder}")
    try:
        fleet.start(lambda text: say(f"  {text}"))
    except KeyboardInterrupt:
        return stopping.code
    stopping.starting = False
    say(describe(fleet, settings))
    try:
        return watch(fleet, stopping, strict=args.strict)
    finally:
        say("stopping: running streams may end; once more ends them at once")
        fleet.stop()


def say(text: str) -> None:
    """Print `text` now."""
    print(text, flush=True)


def make_folder(given: Path | None) -> Path:
    """Where output goes, which stays when the fleet ends. Raises `CommandError`."""
    try:
        folder = given or Path(tempfile.mkdtemp(prefix="dsuf-fleet-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--logs {given}: {error.strerror}") from error
    return folder


def check(args: argparse.Namespace) -> None:
    """Raise `CommandError` for numbers that cannot be."""
    if not 1 <= args.nodes <= MOST_NODES:
        raise CommandError(f"{args.nodes} nodes: 1 to {MOST_NODES} can be tried")
    if not 0 <= args.prefill < args.nodes:
        raise CommandError(f"--prefill {args.prefill}: at least one of {args.nodes} nodes has to answer clients")
    if not 1024 <= args.port <= 65_535 - 2 * CONTROL_ABOVE - MOST_NODES:
        raise CommandError(f"--port {args.port}: 1024 to {65_535 - 2 * CONTROL_ABOVE - MOST_NODES}")


def check_machine(port: int, nodes: int) -> None:
    """Raise `CommandError` where a program is not installed or a port in use, before anything is made."""
    for name in ("redis-server", "haproxy"):
        find_program(name)
    check_ports(port, nodes)


def check_settings(environ: Mapping[str, str]) -> Settings:
    """Settings of a node; raise `CommandError` for settings of all nodes with which this fleet would not come about."""
    try:
        settings = load_settings(
            {"redis_url": f"redis://{HOST}"}, {**environ, "DSUF_PEER_SECRET": 16 * "x"}, find_file()
        )
    except CommandError as error:
        raise CommandError(f"no node would start: {error}") from error
    if settings.tls_cert_file is not None:
        raise CommandError("tls_cert_file: this fleet's balancer speaks plain HTTP to nodes; take the setting away")
    return settings


def describe(fleet: TrialFleet, settings: Settings) -> str:
    """How to use it, and how to see what it does."""
    return (
        f"ready: {fleet.url}\n\n"
        f"{describe_use(fleet.url, settings)}\n"
        f"where prompts came from: curl -s {fleet.node_url(1)}/metrics | grep source_tokens\n"
    )


class Stopping:
    """SIGINT and SIGTERM, as a code to leave with; 0 until one comes. While `fleet` is `starting` the first one is
    raised as `KeyboardInterrupt`; the second one ends what is left of it at once."""

    def __init__(self, fleet: TrialFleet) -> None:
        self.code = 0
        self.asked = False
        self.starting = True
        self._fleet = fleet
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
            signal.signal(number, lambda *_, code=code: self._stop(code))

    def _stop(self, code: int, frame: FrameType | None = None) -> None:
        """Leave; the second time at once."""
        if self.asked:
            for program in self._fleet.programs:
                program.send(signal.SIGKILL)
            return
        self.code, self.asked = code, True
        if self.starting:
            raise KeyboardInterrupt


def watch(fleet: TrialFleet, stopping: Stopping, *, strict: bool) -> int:
    """Wait for a signal, for the end of the balancer, or until no node is left that answers clients; the exit code.
    What else ends starts again, unless this is `strict`: then the first end is that of all.
    """
    keepers = make_keepers(fleet)
    while not stopping.asked:
        fatal = [ended for ended in fleet.find_ended() if strict or ended is fleet.balancer]
        for ended in fatal:
            say(describe_end(ended))
        for keeper in () if fatal else keepers:
            keeper.look()
        away = [keeper.program for keeper in keepers if keeper.away]
        if fatal or all(node in away for node in fleet.answering):
            return 1
        time.sleep(0.2)
    return stopping.code


def make_keepers(fleet: TrialFleet) -> list[Keeper]:
    """Who starts the nodes and Redis again."""
    redis = Keeper(fleet.redis, say, lambda: not can_bind(HOST, fleet.redis_port))
    nodes = enumerate(fleet.nodes, start=1)
    return [redis, *(Keeper(node, say, partial(fleet.is_ready, number)) for number, node in nodes)]

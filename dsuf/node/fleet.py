"""A node among others: the directory, the door for peers, and what comes from them. None of it is there for a node
alone."""

import asyncio
import errno
import os
import secrets
import socket
import ssl
from pathlib import Path

from dsuf.config import Settings
from dsuf.errors import CommandError
from dsuf.kv.departure import Departure
from dsuf.kv.directory.address import RedisAddress, parse_address
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.fleet import FleetDirectory
from dsuf.kv.directory.redis_board import RedisBoard
from dsuf.kv.giver import LocalGiver
from dsuf.kv.puller import Puller
from dsuf.kv.sessions import Sessions
from dsuf.kv.transport.adapter import open_adapter
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peers import FleetPeers
from dsuf.kv.transport.rdma import RdmaFabric
from dsuf.kv.transport.server import PeerServer
from dsuf.observe.fleet import Fleet
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Load, Metrics
from dsuf.sched.scheduler import Scheduler
from dsuf.types import Turn

SWEEP_S = 2.0
"""How often peers are parted from that are no members any more, and new ones met."""
MOST_INVITED = 16
"""Sessions that are fetched at a time for nodes that leave."""


class FleetNode:
    """The fleet's side of a node that keeps its session caches in `sessions`, which peers read over `fabric` where they
    can. The scheduler has prompts fetched by `puller`.

    `join` with the scheduler, `leave` when no turn is left, `close` in any case. Raises `CommandError`.
    """

    def __init__(
        self, settings: Settings, sessions: Sessions, metrics: Metrics, fabric: RdmaFabric | None = None
    ) -> None:  # fmt: skip
        self._settings, self._sessions, self._metrics, self._fabric = settings, sessions, metrics, fabric
        self._me = NodeName(name_node(settings), secrets.token_hex(16))
        self._credentials = read_credentials(settings)
        self._terms = Terms(sessions.layout.fingerprint, b"" if fabric is None else fabric.describe())
        self._address = ("", 0)
        self._draining = False
        self._scheduler: Scheduler | None = None
        self._server: PeerServer | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._invited: set[asyncio.Task[None]] = set()
        self.directory = FleetDirectory(open_board(settings), sessions.arena, self.describe, metrics)
        self._peers = FleetPeers(self._me, sessions, metrics, self._terms, self._credentials, fabric=fabric)
        self.puller = Puller(
            sessions, self.directory, self._peers, token_s=self._token_s, patience=settings.peer_patience,
            delegates=settings.role == "decode",
        )  # fmt: skip

    @property
    def transport(self) -> str:
        """What moves bytes."""
        return "TCP" if self._fabric is None else "RDMA"

    async def join(self, scheduler: Scheduler) -> str:
        """Let peers in, and tell the fleet; where peers reach this node. Raises `CommandError`."""
        self._scheduler, settings = scheduler, self._settings
        giver = LocalGiver(self._sessions, scheduler.prepare)
        self._server = PeerServer(
            self._me, giver, self._terms, self._credentials, fabric=self._fabric, invited=self._accept,
            on_sent=self._metrics.fleet.count_served,
        )  # fmt: skip
        try:
            port = await self._server.listen(settings.control_host, settings.control_port)
        except OSError as error:
            raise _refuse_address(settings, error) from error
        host, given = split_advertise(settings)
        self._address = (host, given or port)
        await self.directory.start()
        self._sweeping = asyncio.create_task(self._sweep())
        self._metrics.fleet.watch(self.observe)
        return f"{self._address[0]}:{self._address[1]}"

    def describe(self) -> Member:
        """What this node tells of itself."""
        load = Load() if self._scheduler is None else self._scheduler.load()
        blocks = self._sessions.arena.blocks
        return Member(
            node=self._me.node, boot=self._me.boot, role=self._settings.role, host=self._address[0],
            port=self._address[1], rdma=self._fabric is not None, draining=self._draining, running=load.running,
            waiting=load.waiting, room_bytes=blocks.free * blocks.block_bytes,
        )  # fmt: skip

    def observe(self) -> Fleet:
        """What the gauges show."""
        known, peers = self.directory.counters(), self._peers.counters()
        return Fleet(
            members=known["members"], entries=known["entries"], reached=bool(known["up"]), suspects=peers["suspects"],
            tcp=peers["tcp"], rdma=peers["rdma"], refusing=len(self._peers.refusals()),
            refused=0 if self._server is None else self._server.refused,
        )  # fmt: skip

    def facts(self) -> dict[str, object]:
        """What a person wants to know of it."""
        health = self.directory.health()
        return {
            "node": self._me.node,
            "boot": self._me.boot,
            "transport": self.transport,
            "members": {member.node: member.role for member in self.directory.members()},
            "directory": dict(self.directory.counters()),
            "trouble": health.trouble,
            "refusals": self._peers.refusals(),
            "peers": self._peers.counters(),
            "guests": dict(self._server.counters()) if self._server is not None else {},
        }

    def begin_drain(self) -> None:
        """No turns come any more; the fleet hears of it with the next beat."""
        self._draining = True

    async def leave(self, seconds: float) -> int:
        """Have peers fetch the hot sessions, within `seconds`, then be no member any more; how many were fetched."""
        moved = await Departure(self._sessions, self.directory, self._peers).run(seconds)
        log_event("sessions moved", sessions=moved)
        await self.directory.withdraw()
        return moved

    async def close(self) -> None:
        """End everything. Idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in (invited := list(self._invited)):
            task.cancel()
        await asyncio.gather(*invited, return_exceptions=True)
        await self.directory.close()
        await self._peers.close()
        if self._server is not None:
            await self._server.close()
        if self._fabric is not None:
            self._fabric.close()

    def _token_s(self, tokens: int) -> float:
        """What computing a token of a prompt of so many takes here now."""
        return 0.0 if self._scheduler is None else self._scheduler.token_s(tokens)

    async def _accept(self, turn: Turn) -> bool:
        """A node that leaves wants its cache of `turn` to be fetched."""
        if self._draining or len(self._invited) >= MOST_INVITED:
            return False
        task = asyncio.create_task(self._fetch(turn))
        self._invited.add(task)
        task.add_done_callback(self._invited.discard)
        return True

    async def _fetch(self, turn: Turn) -> None:
        """Fetch what somebody keeps of the prompt of `turn`."""
        try:
            await self.puller.fetch(turn)
        except Exception as error:
            log_event("session not fetched", level="warning", error=error, turn=turn.id)

    async def _sweep(self) -> None:
        """Part from who is no member any more, and meet who is new."""
        while True:
            await asyncio.sleep(SWEEP_S)
            members = self.directory.members()
            self._peers.keep(members)
            self._peers.greet(members)


def name_node(settings: Settings) -> str:
    """What this node is called."""
    return settings.node_id or f"{socket.gethostname()[:48]}-{settings.port}"


def split_advertise(settings: Settings) -> tuple[str, int]:
    """The host under which peers reach this node, and the port; 0 for the one that it listens on."""
    host, _, port = settings.advertise.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or settings.control_host, int(port or 0)


async def open_fleet(settings: Settings, sessions: Sessions, metrics: Metrics) -> FleetNode:
    """The fleet's side of a node. An RDMA device, if there is one, is given the arena, which nothing is in yet."""
    blocks, adapter = sessions.arena.blocks, None
    host, _ = split_advertise(settings)
    if settings.transport != "tcp":
        adapter = await asyncio.to_thread(
            open_adapter, blocks.memory, blocks.block_bytes, host, wanted=settings.transport
        )
    return FleetNode(settings, sessions, metrics, None if adapter is None else RdmaFabric(adapter))


def check_fleet(settings: Settings) -> None:
    """Raise `CommandError` for what would keep a node out of its fleet, better before its weights are loaded."""
    if not settings.redis_url:
        return
    read_credentials(settings)
    read_address(settings)
    family = socket.AF_INET6 if ":" in settings.control_host else socket.AF_INET
    try:
        socket.create_server((settings.control_host, settings.control_port), family=family).close()
    except OSError as error:
        raise _refuse_address(settings, error) from error


def open_board(settings: Settings) -> RedisBoard:
    """The fleet's board in Redis; nothing is connected yet. Raises `CommandError`."""
    return RedisBoard(read_address(settings))


def read_address(settings: Settings) -> RedisAddress:
    """Where Redis is, and how to log in; raises `CommandError`."""
    password = read_secret("redis_password_file", settings.redis_password_file)
    return parse_address(
        settings.redis_url, password=password, ca_file=settings.redis_ca_file, prefix=settings.redis_prefix
    )


def read_credentials(settings: Settings) -> Credentials:
    """What this node shows to its peers; raises `CommandError` for files that cannot be used."""
    secret = settings.peer_secret or read_secret("peer_secret_file", settings.peer_secret_file)
    called = calls = None
    if settings.peer_cert_file is not None:
        called, calls = (
            make_context(settings, purpose) for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH)
        )
    credentials = Credentials(secret.encode(), called, calls)
    credentials.check()
    return credentials


def make_context(settings: Settings, purpose: ssl.Purpose) -> ssl.SSLContext:
    """TLS between nodes, which verify each other. Raises `CommandError`."""
    assert settings.peer_cert_file is not None
    try:
        context = ssl.create_default_context(purpose, cafile=settings.peer_ca_file)
        context.load_cert_chain(settings.peer_cert_file, settings.peer_key_file)
    except (OSError, ssl.SSLError) as error:
        raise CommandError(f"peer_ca_file, peer_cert_file, peer_key_file: cannot be used: {error}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    context.check_hostname = False  # names are those of nodes, and compared in the hello
    return context


def read_secret(name: str, path: Path | None) -> str:
    """The text of a file with a secret; empty where there is none. Raises `CommandError`."""
    if path is None:
        return ""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise CommandError(f"{name} = {str(path)!r}: cannot be read: {reason}") from error
    if not text:
        raise CommandError(f"{name} = {str(path)!r}: is empty")
    return text


def _refuse_address(settings: Settings, error: OSError) -> CommandError:
    """Why peers cannot be let in there. The loops' own texts are about addresses that were named already."""
    reason = error.strerror or str(error)
    if error.errno is not None and error.errno in errno.errorcode:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno)
    return CommandError(
        f"cannot listen for peers: control_host = {settings.control_host}, control_port = {settings.control_port}: "
        f"{reason}"
    )

"""A node among others, in one process: what it tells, what it fetches and gives away, and settings that cannot work."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dsuf.config import Settings, load_settings
from dsuf.errors import CommandError
from dsuf.kv import pulls
from dsuf.kv.directory import fleet as directory
from dsuf.node import fleet
from dsuf.node.fleet import FleetNode, check_fleet, open_board, read_credentials, read_secret, split_advertise
from dsuf.node.pulse import Pulse
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Turn
from tests.certificates import make_certificates
from tests.kv.board import PACE, MemoryBoard, MemoryRedis
from tests.kv.transport.rig import count_sockets
from tests.toy import ToyEngine, make_turn
from tests.turns.node import Node

SECRET = "a secret of the fleet"


class Place(Node):
    """A node with all its layers but HTTP, in a fleet."""

    def __init__(self, name: str, role: str = "both", secret: str = SECRET) -> None:
        super().__init__(ToyEngine(pages=200))
        self.settings = Settings(
            node_id=name, control_port=0, redis_url="redis://unused", peer_secret=secret, role=role, transport="tcp"  # type: ignore[arg-type]
        )  # fmt: skip
        self.fleet = FleetNode(self.settings, self.sessions, self.metrics)
        limits = Limits(chunk_tokens=16, role=self.settings.role)
        self.scheduler = Scheduler(self.engine, limits, self.metrics, self.sessions, self.fleet.puller)

    async def start(self) -> None:
        """Join."""
        self.running = asyncio.create_task(self.scheduler.run())
        self.address = await self.fleet.join(self.scheduler)

    async def stop(self) -> None:
        """Leave nothing behind."""
        await self.fleet.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.sessions.close()


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, **roles: str) -> AsyncIterator[list[Place]]:
    """Nodes that know each other; afterwards no task and no socket is left."""
    redis, sockets = MemoryRedis(), count_sockets()
    monkeypatch.setattr(fleet, "open_board", lambda settings: MemoryBoard(redis))
    monkeypatch.setattr(directory, "Pace", lambda: PACE)
    # A node with a capital letter has another secret.
    places = [Place(name, role, SECRET if name.islower() else f"not {SECRET}") for name, role in roles.items()]
    for place in places:
        await place.start()
    await until(lambda: all(len(place.fleet.directory.members()) == len(places) - 1 for place in places))
    yield places
    for place in places:
        await place.rest()
        await place.stop()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await until(lambda: count_sockets() <= sockets)


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def until_known(place: Place, turn: Turn, length: int) -> None:
    """Wait until `place` knows that somebody keeps the first `length` positions of `turn`."""
    trace, _ = await place.sessions.foresee(turn)
    await until(lambda: any(found.length >= length for found in place.fleet.directory.find(trace)))


async def test_a_conversation_goes_from_node_to_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, a="both", b="both") as (a, b):
        first = make_turn("one", range(1, 60))
        said = await a.run(first)
        assert said.tokens == a.engine.cold_tokens(first)
        second = make_turn("two", (*first.prompt.ids, *said.tokens, 5, 6))
        await until_known(b, second, 66)
        reply = await b.run(second)
        assert reply.tokens == b.engine.cold_tokens(second)
        assert reply.usage.peer_tokens >= 64
        for place, name in ((b, "dsuf_peer_pulled_bytes_total"), (a, "dsuf_peer_served_bytes_total")):
            assert place.read_metric(name) > 0
        assert b.read_metric('dsuf_peer_connections{transport="tcp"}') == 1
        assert b.read_metric("dsuf_fleet_members") == 1
        assert b.read_metric("dsuf_fleet_directory_up") == 1


def be_slow(place: Place) -> None:
    """What a turn leaves behind takes its time at `place`, as between the long steps of others."""
    place.engine.before = lambda name: 0.15 if name in ("read_state", "read_pages") else 0.0


@pytest.mark.parametrize("drafts", [0, 3])
async def test_the_next_turn_comes_before_the_last_one_is_kept(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """At once, at another node, when nothing was copied or told yet: all of it comes, the reply too."""
    monkeypatch.setattr(pulls, "UNKNOWN_TOKEN_S", 0.05)
    async with running(monkeypatch, a="both", b="both") as (a, b):
        be_slow(a)
        first = make_turn("one", range(1, 60), max_tokens=8 + 8 * drafts)
        said = await a.run(first)
        assert a.sessions.counters()["copies"] > 0
        second = make_turn("two", (*first.prompt.ids, *said.tokens, 5, 6))
        reply = await b.run(second)
        assert reply.tokens == b.engine.cold_tokens(second)
        assert reply.usage.peer_tokens == len(first.prompt.ids) + len(said.tokens) - 1
        assert b.fleet._peers.counters()["suspects"] == 0


async def test_a_node_that_dies_before_the_last_turn_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn, which waits for it, is computed."""
    monkeypatch.setattr(pulls, "UNKNOWN_TOKEN_S", 0.05)
    async with running(monkeypatch, a="both", b="both") as (a, b):
        be_slow(a)
        first = make_turn("one", range(1, 60))
        said = await a.run(first)
        second = make_turn("two", (*first.prompt.ids, *said.tokens, 5, 6))
        running_b = asyncio.create_task(b.run(second))
        await until(lambda: a.fleet.facts()["guests"]["turns"] > 0)  # type: ignore[index]
        await a.fleet.close()
        reply = await running_b
        assert reply.tokens == b.engine.cold_tokens(second)
        assert reply.usage.peer_tokens == 0


async def test_a_node_that_leaves_gives_away_what_is_not_kept_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, a="both", b="both") as (a, b):
        be_slow(a)
        said = await a.run(make_turn("one", range(1, 60)))
        a.fleet.begin_drain()
        assert await a.fleet.leave(5.0) == 1
        await a.fleet.close()
        reply = await b.run(make_turn("two", (*range(1, 60), *said.tokens, 5, 6)))
        assert reply.usage.host_tokens == 66


async def test_a_node_with_another_secret_gets_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any turn needs a peer; the others name it, serve on, and take from each other as ever."""
    monkeypatch.setattr(fleet, "SWEEP_S", 0.05)
    async with running(monkeypatch, a="both", b="both", Odd="both") as (a, b, odd):
        await until(lambda: all(place.read_metric("dsuf_peer_refusals") for place in (a, b, odd)))
        await until(lambda: odd.read_metric("dsuf_peer_refusals") == 2)
        pulses = [Pulse(place.settings, place.metrics) for place in (a, odd)]
        for place, pulse in zip((a, odd), pulses, strict=True):
            pulse.starting = None
            pulse.watch_fleet(place.fleet.facts)
            assert pulse.readiness().ready
        assert [text.split(":")[1].strip() for text in pulses[0].readiness().degraded] == ["Odd"]
        told = pulses[1].readiness().degraded
        assert [text.split(":")[1].strip() for text in told] == ["a", "b"]
        assert all(text.startswith("peers: ") and "another secret?" in text for text in told)
        assert odd.read_metric("dsuf_peer_refused_connections") >= 2
        first = make_turn("one", range(1, 60))
        said = await a.run(first)
        second = make_turn("two", (*first.prompt.ids, *said.tokens, 5, 6))
        await until_known(odd, second, 66)
        reply = await odd.run(second)
        assert reply.tokens == odd.engine.cold_tokens(second)
        assert reply.usage.peer_tokens == 0
        await until_known(b, second, 66)
        assert (await b.run(second)).usage.peer_tokens >= 64


async def test_a_prompt_is_computed_by_a_node_that_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, a="prefill", b="decode") as (a, b):
        turn = make_turn("one", range(1, 60))
        reply = await b.run(turn)
        assert reply.tokens == b.engine.cold_tokens(turn)
        assert reply.usage.peer_tokens > 50
        await a.fleet.close()
        other = make_turn("two", range(100, 160))
        reply = await b.run(other)
        assert reply.tokens == b.engine.cold_tokens(other)
        assert reply.usage.peer_tokens == 0


async def test_a_node_that_leaves_gives_its_sessions_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, a="both", b="both") as (a, b):
        said = [await a.run(make_turn(str(number), [number] * 50)) for number in range(3)]
        a.fleet.begin_drain()
        assert a.fleet.describe().draining
        assert await a.fleet.leave(5.0) == 3
        await until(lambda: not b.fleet.directory.members())
        await a.fleet.close()
        turn = make_turn("again", (*[1] * 50, *said[1].tokens, 7))
        reply = await b.run(turn)
        assert reply.tokens == b.engine.cold_tokens(turn)
        assert reply.usage.host_tokens >= 56


async def test_a_node_that_leaves_takes_no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, a="both", b="both") as (a, b):
        await a.run(make_turn("x", range(1, 60)))
        b.fleet.begin_drain()
        assert await b.fleet._accept(make_turn("y", range(1, 60))) is False
        await until(lambda: all(member.draining for member in a.fleet.directory.members()))
        assert await a.fleet.leave(5.0) == 0


async def test_what_a_node_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, a="both", b="decode") as (a, b):
        member = a.fleet.directory.members()[0]
        assert (member.node, member.role, f"{member.host}:{member.port}") == ("b", "decode", b.address)
        assert member.room_bytes == b.arena.blocks.count * b.arena.blocks.block_bytes
        facts = a.fleet.facts()
        assert facts["members"] == {"b": "decode"}
        assert (facts["node"], facts["transport"], facts["trouble"]) == ("a", "TCP", None)
        assert facts["guests"]["offers"] == 0  # type: ignore[index]


async def test_the_port_for_peers_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "open_board", lambda settings: MemoryBoard(MemoryRedis()))
    other = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    place = Place("a")
    place.fleet._settings = load_settings(
        {"control_port": other.sockets[0].getsockname()[1], "redis_url": "redis://unused", "peer_secret": SECRET}
    )
    with pytest.raises(CommandError, match=r"cannot listen for peers: .* = \d+: the port is in use"):
        await place.start()
    await place.stop()
    other.close()


def test_where_peers_reach_a_node() -> None:
    """Brackets of an address are for the eye, and not a part of it."""
    for given, host, port in (
        ("h:7", "h", 7),
        ("[fd00::1]:7", "fd00::1", 7),
        ("fd00::1:7", "fd00::1", 7),
        ("", "c", 0),
    ):
        assert split_advertise(Settings(advertise=given, control_host="c")) == (host, port)


def test_a_node_without_a_name_is_called_by_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.socket, "gethostname", lambda: "h" * 200)
    monkeypatch.setattr(fleet, "open_board", lambda settings: MemoryBoard(MemoryRedis()))
    place = Place("")
    assert place.fleet.describe().node == "h" * 48 + "-8000"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_without_a_secret(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError, match=f"peer_secret_file = .*secret': {words}"):
        read_secret("peer_secret_file", path)


def test_a_secret_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    assert read_secret("x", path) == SECRET
    assert read_secret("x", None) == ""
    assert read_credentials(Settings(peer_secret_file=path)).secret == SECRET.encode()


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_fleet_needs_a_secret_that_is_long_enough(secret: str) -> None:
    with pytest.raises(CommandError):
        read_credentials(Settings(peer_secret=secret))


def test_certificates_of_peers(tmp_path: Path) -> None:
    """With them there need not be a secret; what is no certificate is named."""
    made = make_certificates(tmp_path)
    files: dict[str, Any] = {
        "peer_ca_file": made.ca, "peer_cert_file": made.certificate, "peer_key_file": made.key,
    }  # fmt: skip
    credentials = read_credentials(Settings(**files))
    assert credentials.called is not None and credentials.called.verify_mode == ssl.CERT_REQUIRED
    assert credentials.calls is not None and credentials.calls.verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(CommandError, match="cannot be used"):
        read_credentials(Settings(**files | {"peer_cert_file": tmp_path / "none"}))


@pytest.mark.parametrize("url", ["http://x", "redis://", "redis://h:99999", "redis+sentinel://h", "nonsense"])
def test_a_url_that_is_none_of_redis(url: str) -> None:
    with pytest.raises(CommandError, match="redis_url"):
        open_board(Settings(redis_url=url))


def test_what_keeps_a_node_out_is_told_before_it_loads(tmp_path: Path) -> None:
    """Secrets, URL and port are tried at the very start; a node alone needs none of them."""
    good = {"redis_url": "redis://127.0.0.1:1", "peer_secret": SECRET, "control_port": 0}
    check_fleet(Settings(**good))  # type: ignore[arg-type]
    check_fleet(Settings(peer_secret_file=tmp_path / "none", control_host="no such host"))
    bad: list[dict[str, Any]] = [
        {"peer_secret": "short"}, {"peer_secret": "", "peer_secret_file": tmp_path / "none"}, {"redis_url": "x://y"},
        {"redis_password_file": tmp_path / "none"}, {"control_host": "192.0.2.1"}, {"control_host": "no.host.invalid"},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(CommandError) as refused:
            check_fleet(Settings(**good | change))
        assert next(iter(change)) in str(refused.value) or "peer_secret" in str(refused.value)
        assert "Errno" not in str(refused.value) and "\n" not in str(refused.value)

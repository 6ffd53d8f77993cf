"""The directory over real Redis servers: what they can be, and what can happen to them."""

import asyncio
import os
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.exceptions import RedisError

from dsuf.kv.directory.address import parse_address
from dsuf.kv.directory.board import BoardFailed
from dsuf.kv.directory.book import Book
from dsuf.kv.directory.pace import Pace
from dsuf.kv.directory.redis_board import RedisBoard, RedisSubscription
from tests.certificates import make_certificates
from tests.kv.directory.fleet import Node, agree, churn, until
from tests.kv.directory.redis_server import RedisServer, stopping

pytestmark = pytest.mark.needs_redis

CALL_S = 0.5
PACE = Pace(
    beat_s=0.1, expiry_s=1.0, gather_s=0.002, silence_s=0.5, resync_s=0.05, retry_s=0.02, retry_most_s=0.2,
    record_s=5.0, leave_s=1.0,
)  # fmt: skip

Make = Callable[..., Node]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A plain server."""
    started = RedisServer(tmp_path / "redis")
    with stopping(started):
        yield started


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes members from a URL, and closes them: no task and no descriptor is left."""
    nodes: list[Node] = []
    open_before = len(os.listdir("/proc/self/fd"))

    def one(name: str, url: str | RedisServer, pace: Pace = PACE, **options: Any) -> Node:
        text = f"redis://127.0.0.1:{url.port}" if isinstance(url, RedisServer) else url
        board = RedisBoard(parse_address(text, **options), call_s=CALL_S)
        nodes.append(Node(board, name, pace=pace, blocks=30_000))
        return nodes[-1]

    yield one
    for node in nodes:
        await node.directory.close()
    await asyncio.sleep(0.02)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(os.listdir("/proc/self/fd")) <= open_before


async def start(*nodes: Node) -> None:
    """Start members, one after the other; they know each other then."""
    for node in nodes:
        await node.directory.start()
    await until(lambda: agree(*nodes), 10.0)


async def check_exchange(a: Node, b: Node) -> None:
    """One keeps, the other finds."""
    a.keep(range(20))
    await start(a, b)
    b.keep(range(100, 140))
    await until(lambda: a.lengths(range(100, 150)) == {"b": 40} and b.lengths(range(30)) == {"a": 20})
    a.arena.clear()
    await until(lambda: b.find(range(30)) == [] and agree(a, b))
    assert a.directory.health().trouble is b.directory.health().trouble is None


async def test_a_plain_server_and_what_it_holds(server: RedisServer, make: Make) -> None:
    a, b = make("a", server), make("b", server)
    await check_exchange(a, b)
    assert set(server.ask("keys", "*").split()) == {"{dsuf}:1:names", "{dsuf}:1:record:a:1", "{dsuf}:1:record:b:1"}
    assert server.ask("hlen", "{dsuf}:1:record:b:1") == str(3 + len(b.told()))
    assert all(0 < int(server.ask("pttl", key)) <= 5000 for key in server.ask("keys", "*").split())
    await a.directory.close()
    await until(lambda: b.names() == [])
    await b.directory.close()
    assert server.ask("dbsize") == "0"


async def test_databases_prefixes_and_passwords_keep_fleets_apart(tmp_path: Path, make: Make) -> None:
    password = "p:/ @w"
    server = RedisServer(tmp_path / "redis", f'requirepass "{password}"')
    with stopping(server):
        where = f"127.0.0.1:{server.port}"
        a, b = make("a", f"redis://:p%3A%2F%20%40w@{where}/3"), make("b", f"redis://{where}/3", password=password)
        stranger = make("c", f"redis://{where}/3", password=password, prefix="other")
        wrong = make("d", f"redis://:wrong@{where}/3", pace=msgspec.structs.replace(PACE, start_s=0.2))
        await stranger.directory.start()
        await check_exchange(a, b)
        await wrong.directory.start()
        assert "password" in str(wrong.directory.health().trouble)
        assert "wrong" not in str(wrong.directory.health().trouble)
        assert stranger.names() == []
        assert server.ask("-n", "3", "dbsize", secret=password) == "5"
        await wrong.directory.close()
        await stranger.directory.close()
        await a.directory.close()
        await b.directory.close()


async def test_a_user_needs_few_rights(tmp_path: Path, make: Make) -> None:
    rights = (
        "+@connection +eval +hget +hset +hdel +hlen +hmget +hscan +pexpire +sadd +srem +smembers +exists +del +publish "
        "+subscribe +unsubscribe"
    )
    user = f"user dsuf on >secret ~{{fleet}}:* &{{fleet}}:* {rights}"
    server = RedisServer(tmp_path / "redis", "user default off", user)
    with stopping(server):
        url = f"redis://dsuf:secret@127.0.0.1:{server.port}"
        a, b = make("a", url, prefix="fleet"), make("b", url, prefix="fleet")
        await check_exchange(a, b)
        other = make("c", url, prefix="other", pace=msgspec.structs.replace(PACE, start_s=0.2))
        await other.directory.start()
        assert "permission" in str(other.directory.health().trouble).lower()
        for node in (other, a, b):
            await node.directory.close()


async def test_tls_proves_who_the_server_is(tmp_path: Path, make: Make) -> None:
    made = make_certificates(tmp_path)
    files = [f"tls-cert-file {made.certificate}", f"tls-key-file {made.key}", f"tls-ca-cert-file {made.ca}"]
    server = RedisServer(tmp_path / "redis", *files, tls=True)
    with stopping(server):
        url, login = f"rediss://127.0.0.1:{server.port}", f"cert_file={made.certificate}&key_file={made.key}"
        a, b = make("a", f"{url}?{login}", ca_file=made.ca), make("b", f"{url}?ca_file={made.ca}&{login}")
        await check_exchange(a, b)
        hurried = msgspec.structs.replace(PACE, start_s=0.3)
        doubtful = make("c", f"{url}?{login}", pace=hurried)  # signed by nobody that the system knows
        unknown = make("d", url, pace=hurried, ca_file=made.ca)  # shows no certificate
        for node in (doubtful, unknown):
            await node.directory.start()
            assert node.directory.health().trouble is not None
            assert node.names() == []


async def test_killed_and_restarted_empty(server: RedisServer, make: Make) -> None:
    a, b = make("a", server), make("b", server)
    a.keep(range(20))
    await start(a, b)
    server.kill()
    a.keep(range(60))
    await until(lambda: a.directory.health().trouble is not None and b.directory.health().trouble is not None)
    await asyncio.sleep(2 * PACE.expiry_s)
    assert b.lengths(range(30)) == {"a": 20}, "what is known stays"
    server.start()
    took_s = await until(lambda: agree(a, b) and b.lengths(range(70)) == {"a": 60})
    assert took_s < 5.0
    await until(lambda: a.directory.health().trouble is b.directory.health().trouble is None)
    c = make("c", server)
    await start(c)
    assert c.names() == ["a", "b"]
    assert c.lengths(range(70)) == {"a": 60}


async def test_paused(server: RedisServer, make: Make) -> None:
    a, b = make("a", server), make("b", server)
    a.keep(range(20))
    await start(a, b)
    rng = random.Random(5)
    server.pause()
    try:
        for _ in range(40):
            a.keep([rng.randrange(90)] * rng.randrange(9, 40))
            await asyncio.sleep(0.05)
        assert a.directory.health().trouble is not None
        assert b.directory.health().trouble is not None
        assert b.lengths(range(30)) == {"a": 20}
    finally:
        server.resume()
    assert await until(lambda: agree(a, b)) < 5.0
    await until(lambda: a.directory.health().trouble is b.directory.health().trouble is None)


@pytest.mark.full
async def test_a_node_that_stood_still_forgets_nobody(server: RedisServer, make: Make) -> None:
    """Its event loop was blocked for longer than a silent member is kept."""
    a, b = make("a", server), make("b", server)
    a.keep(range(20))
    await start(a, b)
    ends_s = time.monotonic() + 1.5 * PACE.expiry_s
    while time.monotonic() < ends_s:
        pass
    seen = []
    for _ in range(20):
        seen.append(b.names())
        await asyncio.sleep(0.02)
    assert seen == [["a"]] * 20


async def test_a_cancelled_call_ends_even_where_the_library_loses_that(server: RedisServer) -> None:
    async def lose() -> int:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return 1
        return 2

    board = RedisBoard(parse_address(f"redis://127.0.0.1:{server.port}"))
    task = asyncio.create_task(board.ask(lose()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await board.close()


@pytest.mark.parametrize(
    "error", [RedisError("x"), OSError("x"), RuntimeError("x"), EOFError("x"), asyncio.CancelledError()]
)
async def test_whatever_the_library_raises_is_a_failed_call(server: RedisServer, error: BaseException) -> None:
    """Also what it cancels itself: who asked was not cancelled, and goes on."""

    async def fail() -> None:
        raise error

    board = RedisBoard(parse_address(f"redis://127.0.0.1:{server.port}"))
    with pytest.raises(BoardFailed, match="redis://"):
        await board.ask(fail())
    assert await board.names() == []
    await board.close()


@pytest.mark.full
async def test_a_master_that_is_a_replica_now(server: RedisServer, tmp_path: Path, make: Make) -> None:
    master = RedisServer(tmp_path / "master")
    with stopping(master):
        a, b = make("a", server), make("b", server)
        a.keep(range(20))
        await start(a, b)
        server.ask("replicaof", "127.0.0.1", str(master.port))
        await until(lambda: "replica" in str(a.directory.health().trouble))
        a.keep(range(60))
        await asyncio.sleep(1.5 * PACE.expiry_s)
        assert b.lengths(range(30)) == {"a": 20}
        server.ask("replicaof", "no", "one")
        await until(lambda: b.lengths(range(70)) == {"a": 60} and agree(a, b))
        await until(lambda: a.directory.health().trouble is None)


async def test_flushed_while_it_is_written(server: RedisServer, make: Make) -> None:
    a, b = make("a", server, pace=msgspec.structs.replace(PACE, batch_entries=10)), make("b", server)
    await start(a, b)
    rng = random.Random(6)
    points = []
    for _ in range(300):
        points.append(a.keep([rng.randrange(5)] * 8 * rng.randrange(1, 9) + [rng.randrange(1000)]))
        if rng.random() < 0.3:
            a.arena.withdraw(points.pop(rng.randrange(len(points))))
        if rng.random() < 0.05:
            server.ask("flushall")
        await asyncio.sleep(0.002)
    await until(lambda: agree(a, b))
    size = 3 + len(a.told())
    await until(lambda: server.ask("hlen", "{dsuf}:1:record:a:1") == str(size))


@pytest.mark.parametrize("share", [0.0, 0.1])
async def test_under_load_and_with_lost_news(
    server: RedisServer, make: Make, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    rng, hear = random.Random(7), RedisSubscription.next

    async def hear_most(self: RedisSubscription, timeout_s: float) -> bytes | None:
        data = await hear(self, timeout_s)
        return None if data is not None and rng.random() < share else data

    monkeypatch.setattr(RedisSubscription, "next", hear_most)
    nodes = [make(name, server) for name in "abc"]
    await start(*nodes)
    await churn(nodes, 600, random.Random(8))
    assert await until(lambda: agree(*nodes)) < 5.0
    missed = sum(node.directory._roster.gaps for node in nodes)
    assert (missed > 0) == (share > 0)
    assert sum(node.count("directory_resyncs_total") for node in nodes) >= min(missed, 1)


async def test_connections_that_are_cut_are_made_again(server: RedisServer, make: Make) -> None:
    a, b = make("a", server), make("b", server)
    await start(a, b)
    for n in range(20):
        server.ask("client", "kill", "type", "pubsub" if n % 2 else "normal")
        a.keep([n] * 9)
        await asyncio.sleep(0.03)
    await until(lambda: agree(a, b))
    assert len(b.known(a)) == 40


@pytest.mark.full
async def test_sentinels_know_the_new_master(tmp_path: Path, make: Make) -> None:
    master = RedisServer(tmp_path / "one")
    replica = RedisServer(tmp_path / "two", f"replicaof 127.0.0.1 {master.port}")
    watch = [f"sentinel monitor fleet 127.0.0.1 {master.port} 1", "sentinel down-after-milliseconds fleet 500"]
    watch += ["sentinel failover-timeout fleet 2000"]
    sentinel = RedisServer(tmp_path / "three", *watch, sentinel=True)
    with stopping(master, replica, sentinel):
        await asyncio.to_thread(wait_for_replica, sentinel)
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/fleet/1"
        a, b = make("a", url), make("b", url)
        a.keep(range(20))
        await start(a, b)
        master.kill()
        a.keep(range(60))
        await until(lambda: b.lengths(range(70)) == {"a": 60}, 30.0)
        assert replica.ask("role").split()[0] == "master"
        await until(lambda: agree(a, b) and a.directory.health().trouble is b.directory.health().trouble is None)
        for node in (a, b):
            await node.directory.close()


def wait_for_replica(sentinel: RedisServer) -> None:
    """Wait until the Sentinel has seen the replica."""
    for _ in range(100):
        if "num-other-sentinels" in (said := sentinel.ask("sentinel", "master", "fleet")):
            words = said.split()
            if words[words.index("num-slaves") + 1] == "1":
                return
        asyncio.run(asyncio.sleep(0.1))
    raise AssertionError("the Sentinel sees no replica")


@pytest.mark.full
async def test_a_cluster_keeps_all_of_a_fleet_in_one_place(tmp_path: Path, make: Make) -> None:
    config = ["cluster-enabled yes", "cluster-node-timeout 1000", "cluster-require-full-coverage no"]
    servers = [RedisServer(tmp_path / str(n), *config) for n in range(3)]
    with stopping(*servers):
        for n, server in enumerate(servers):
            first, last = (16384 * n // 3, 16384 * (n + 1) // 3 - 1)
            assert server.ask("cluster", "addslotsrange", str(first), str(last)) == "OK"
            servers[0].ask("cluster", "meet", "127.0.0.1", str(server.port))
        for server in servers:
            await until(lambda server=server: "cluster_slots_ok:16384" in server.ask("cluster", "info"), 20.0)
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers[:2])
        await check_exchange(make("a", url), make("b", url, prefix="dsuf"))
        assert sorted(server.ask("dbsize") for server in servers) == ["0", "0", "3"]


@pytest.mark.full
async def test_ten_thousand_entries_are_known_soon(server: RedisServer, make: Make, capsys: Any) -> None:
    pace = msgspec.structs.replace(PACE, record_s=60.0, beat_s=0.3, silence_s=3.0, expiry_s=5.0, start_s=10.0)
    a, b, c = make("a", server, pace=pace), make("b", server, pace=pace), make("c", server, pace=pace)
    await start(a, b)
    for n in range(5000):
        a.keep([n % 251, n % 253, n, *range(8)])
        if n % 100 == 0:
            await asyncio.sleep(0)
    changed_s = await until(lambda: agree(a, b), 20.0)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await c.directory.start()
    start_s = loop.time() - started_s
    assert agree(a, c)
    assert len(c.known(a)) == 10_000
    assert start_s < 15.0
    size = int(server.ask("memory", "usage", "{dsuf}:1:record:a:1"))
    with capsys.disabled():
        print(f"\n10,000 entries: told in {changed_s:.2f} s, read at a start in {start_s:.2f} s, "
              f"{size / 10_000:.0f} bytes each in Redis")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "bound_bytes"), [(8, 330), (9, 600)])
def test_what_an_entry_takes(tokens: int, bound_bytes: int, capsys: Any) -> None:
    """Of pages (those of a whole page, one state apart), and of states."""
    rng = random.Random(1)
    entries = [rng.randbytes(16 if tokens == 8 else 61) for _ in range(20_000)]
    tracemalloc.start()
    book = Book()
    before, _ = tracemalloc.get_traced_memory()
    for start in range(0, len(entries), 500):
        book.add(0, [bytes(bytearray(entry)) for entry in entries[start : start + 500]])
    each = (tracemalloc.get_traced_memory()[0] - before) / len(entries)
    tracemalloc.stop()
    with capsys.disabled():
        print(f"\nan entry of {len(entries[0])} bytes takes {each:.0f} bytes")
    assert each < bound_bytes


async def test_nothing_at_the_address(make: Make, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    server.kill()
    a = make("a", server, pace=msgspec.structs.replace(PACE, start_s=0.2))
    await a.directory.start()
    assert a.directory.health().trouble is not None
    with pytest.raises(BoardFailed):
        await a.board.names()
    server.start()
    with stopping(server):
        await until(lambda: a.directory.health().trouble is None)
        await a.directory.close()


async def test_wall_clocks_do_not_matter(server: RedisServer, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They jump by minutes, back and forth, on all nodes; that of Redis is its own."""
    a, b = make("a", server), make("b", server)
    a.keep(range(20))
    await start(a, b)
    real = time.time
    for n in range(6):
        monkeypatch.setattr(time, "time", lambda n=n: real() + (-1) ** n * 300)
        a.keep([n] * 17)
        await until(lambda: agree(a, b))
        await asyncio.sleep(3 * PACE.beat_s)
        assert a.names() == ["b"]
        assert b.names() == ["a"]
    assert a.directory.health().trouble is None

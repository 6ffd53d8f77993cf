"""Directories over a board in memory: what they find of each other, and that no fault of the board lasts."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from dsuf.kv.directory.contract import Health
from dsuf.kv.directory.local import LocalDirectory
from tests.kv.board import PACE, MemoryBoard, MemoryRedis
from tests.kv.directory.fleet import Node, agree, churn, until
from tests.kv.rig import make_prompt_trace

Make = Callable[..., Node]


@pytest.fixture
def redis() -> MemoryRedis:
    return MemoryRedis()


@pytest.fixture
async def make(redis: MemoryRedis) -> AsyncIterator[Make]:
    """Makes members, and closes them; nothing of them is left then."""
    nodes: list[Node] = []

    def one(name: str, **options: Any) -> Node:
        nodes.append(Node(MemoryBoard(redis), name, **options))
        return nodes[-1]

    yield one
    redis.down = redis.read_only = redis.answers_lost = False
    for node in nodes:
        await node.directory.close()
        await node.directory.close()
        assert node.arena.listeners == []
        assert isinstance(node.board, MemoryBoard)
        assert node.board.closed
    assert redis.subscribers == set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def start(*nodes: Node) -> None:
    """Start members, one after the other."""
    for node in nodes:
        await node.directory.start()
    await until(lambda: agree(*nodes))


async def test_what_one_keeps_the_other_finds_until_it_goes(make: Make) -> None:
    a, b = make("a"), make("b")
    early = a.keep(range(20))
    await start(a, b)
    assert b.lengths(range(50)) == {"a": 20}
    a.keep(range(37))
    await until(lambda: b.lengths(range(50)) == {"a": 37})
    [candidate] = b.find(range(50))
    assert (candidate.member.port, candidate.whole_pages, candidate.stateful) == (8100, 4, True)
    assert candidate.start(8, 16) == 37
    assert a.find(range(50)) == [], "a node is no candidate for itself"
    a.arena.withdraw(early)
    other = [*range(33), 7, 7]
    await until(lambda: b.lengths(other) == {"a": 0})
    assert b.find(other)[0].start(8, 16) == 16, "whole pages, all but a window"
    a.arena.clear()
    await until(lambda: b.find(range(50)) == [])
    assert agree(a, b)


async def test_those_with_more_come_first_then_the_less_loaded(make: Make) -> None:
    nodes = [make(name) for name in "abcd"]
    for node, tokens, running in zip(nodes, (20, 40, 40, 0), (0, 3, 1, 0), strict=True):
        node.member = msgspec.structs.replace(node.member, running=running)
        if tokens:
            node.keep(range(tokens))
    await start(*nodes)
    asker = nodes[3]
    await until(lambda: [candidate.member.node for candidate in asker.find(range(60))] == ["c", "b", "a"])
    nodes[2].member = msgspec.structs.replace(nodes[2].member, waiting=7)
    await until(lambda: [candidate.member.node for candidate in asker.find(range(60))] == ["b", "c", "a"])
    assert asker.names() == ["a", "b", "c"]


async def test_one_that_leaves_is_gone_at_once_and_one_that_dies_soon(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    for node in (a, b):
        node.keep(range(20))
    await start(a, b, c)
    assert set(c.lengths(range(30))) == {"a", "b"}
    await a.directory.withdraw()
    assert await until(lambda: set(c.lengths(range(30))) == {"b"}) < PACE.expiry_s
    assert a.directory.health() == Health()
    b.kill()
    await until(lambda: c.names() == [])
    assert c.directory.counters()["entries"] == 0


async def test_a_node_that_begins_anew_is_found_as_what_it_is_now(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a"), make("b")
    a.keep(range(20))
    await start(a, b)
    a.kill()
    again = make("a", boot="2")
    again.keep(range(100, 120))
    await start(again)
    assert await until(lambda: b.find(range(30)) == []) < PACE.expiry_s
    assert [c.member.boot for c in b.find(range(100, 130))] == ["2"]
    assert again.find(range(30)) == [], "its own past is none of its peers"
    assert again.directory.health().trouble is None


async def test_two_processes_of_one_name_say_so(make: Make) -> None:
    a, twin, b = make("a"), make("a", boot="2"), make("b")
    twin.keep(range(20))
    for node in (a, twin, b):
        await node.directory.start()
    await until(lambda: "calls itself a" in str(a.directory.health().trouble))
    await until(lambda: "calls itself a" in str(twin.directory.health().trouble))
    await until(lambda: b.names() == ["a", "a"] and b.lengths(range(30)) == {"a": 20})
    assert b.directory.health().trouble is None
    await twin.directory.close()
    await until(lambda: a.directory.health().trouble is None)


async def test_under_load_all_know_in_the_end_what_each_keeps(make: Make) -> None:
    nodes = [make(name) for name in "abc"]
    await start(*nodes)
    await churn(nodes, 600, random.Random(1))
    await until(lambda: agree(*nodes))
    assert all(node.count("directory_resyncs_total") == 0 for node in nodes), "nothing was missed"


@pytest.mark.parametrize("share", [0.1, 0.5])
async def test_lost_news_are_made_up_for(make: Make, redis: MemoryRedis, share: float) -> None:
    rng = random.Random(2)
    nodes = [make(name) for name in "abc"]
    await start(*nodes)
    redis.drops = lambda: rng.random() < share
    await churn(nodes, 300, rng)
    took_s = await until(lambda: agree(*nodes))
    assert took_s < 5 * PACE.beat_s + 20 * PACE.resync_s
    assert sum(node.directory._roster.gaps for node in nodes) > 0


@pytest.mark.parametrize("fault", ["down", "read_only", "answers_lost"])
async def test_a_board_that_fails_costs_nothing_that_is_known(make: Make, redis: MemoryRedis, fault: str) -> None:
    a, b = make("a"), make("b")
    a.keep(range(20))
    await start(a, b)
    setattr(redis, fault, True)
    a.keep(range(40))
    await until(lambda: a.directory.health().trouble is not None and b.directory.health().trouble is not None)
    await asyncio.sleep(2 * PACE.expiry_s)
    assert b.names() == ["a"]
    assert b.lengths(range(30)) == {"a": 20}
    assert b.directory.counters()["up"] == b.count("directory_up") == 0
    assert b.count("directory_errors_total") > 0
    assert a.directory.health().since_s > PACE.expiry_s
    setattr(redis, fault, False)
    await until(lambda: b.lengths(range(60)) == {"a": 40} and agree(a, b))
    await until(lambda: a.directory.health().trouble is b.directory.health().trouble is None)
    assert b.count("directory_up") == 1


async def test_a_board_that_lost_everything_gets_it_again(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a"), make("b")
    a.keep(range(20))
    await start(a, b)
    reads = redis.reads
    redis.lose_data()
    await until(lambda: redis.entries.get(a.directory._announcer.name) == a.told())
    assert redis.reads == reads, "who missed nothing has nothing to read"
    assert agree(a, b)
    c = make("c")
    await start(c)
    await until(lambda: set(c.names()) == {"a", "b"})  # b, which had nothing to tell, with its next beat
    assert c.lengths(range(30)) == {"a": 20}


async def test_a_board_that_lost_the_last_changes_gets_all_again(make: Make, redis: MemoryRedis) -> None:
    """As a replica does that took over too early."""
    a, b = make("a"), make("b")
    await start(a, b)
    name = a.directory._announcer.name
    entries, head = set(redis.entries[name]), redis.heads[name]
    a.keep(range(20))
    await until(lambda: agree(a, b) and b.known(a))
    redis.entries[name], redis.heads[name] = entries, head
    await until(lambda: redis.entries[name] == a.told())
    redis.entries[name] = set(list(a.told())[1:])
    await until(lambda: redis.entries[name] == a.told())
    assert agree(a, b)


async def test_changes_made_while_it_is_written_anew_are_told_too(make: Make, redis: MemoryRedis) -> None:
    rng = random.Random(3)
    a, b = make("a", pace=msgspec.structs.replace(PACE, batch_entries=5)), make("b")
    await start(a, b)
    redis.delay_s = 0.002
    for _ in range(5):
        redis.lose_data()
        await churn([a, b], 60, rng)
    await until(lambda: agree(a, b))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_the_board_does_all_agree_in_the_end(make: Make, redis: MemoryRedis, seed: int) -> None:
    """Faults come and go while caches do."""
    rng = random.Random(seed)
    nodes = [make(name, pace=msgspec.structs.replace(PACE, batch_entries=7, unsent_entries=60)) for name in "abc"]
    await start(*nodes)
    for _ in range(40):
        redis.down, redis.read_only = rng.random() < 0.15, rng.random() < 0.15
        redis.answers_lost = rng.random() < 0.3
        redis.delay_s = rng.choice([0.0, 0.0, 0.001, 0.004])
        share = rng.choice([0.0, 0.0, 0.2])
        redis.drops = lambda share=share: rng.random() < share
        if rng.random() < 0.1:
            redis.lose_data()
        await churn(nodes, 20, rng)
    redis.down = redis.read_only = redis.answers_lost = False
    redis.delay_s, redis.drops = 0.0, lambda: False
    await until(lambda: agree(*nodes))
    await until(lambda: all(redis.entries.get(node.directory._announcer.name) == node.told() for node in nodes))
    await until(lambda: all(node.directory.health().trouble is None for node in nodes))


async def test_more_changes_than_may_wait_become_one_reading(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a", pace=msgspec.structs.replace(PACE, unsent_entries=20)), make("b")
    await start(a, b)
    redis.down = True
    for n in range(60):
        a.keep([n] * 9)
    assert a.directory.counters()["unsent"] <= 21
    redis.down = False
    await until(lambda: agree(a, b))
    assert len(b.known(a)) == 120


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), asyncio.CancelledError()])
@pytest.mark.parametrize("call", ["post", "subscribe"])
async def test_what_ends_by_a_fault_of_ours_goes_on(
    make: Make, redis: MemoryRedis, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    """Telling and hearing are begun again, and the node says meanwhile that something is wrong."""
    a, b = make("a"), make("b")
    await start(a, b)
    real, failed = getattr(a.board, call), list[BaseException]()

    def fail(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(error)
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(a.board, call, fail)
    if call == "subscribe":
        redis.down = True
        await until(lambda: a.directory.health().trouble)
        redis.down = False
    a.keep(range(20))
    b.keep(range(50, 90))
    await until(lambda: failed and a.directory.health() == Health())
    await until(lambda: agree(a, b))
    assert b.lengths(range(50)) == {"a": 20}


async def test_a_start_without_a_board_does_not_wait_for_ever(make: Make, redis: MemoryRedis) -> None:
    a = make("a", pace=msgspec.structs.replace(PACE, start_s=0.1))
    redis.down = True
    await a.directory.start()
    assert a.directory.health().trouble is not None
    assert a.find(range(9)) == []
    redis.down = False
    await until(lambda: a.directory.health().trouble is None)


async def test_a_start_waits_until_the_fleet_is_known(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a", blocks=5000), make("b")
    for n in range(1500):
        a.keep([n] * 9)
    await start(a)
    redis.delay_s = 0.02
    await b.directory.start()
    assert b.lengths([7] * 12) == {"a": 9}
    assert agree(a, b)


async def test_a_name_without_a_record_is_cleared_away(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a"), make("b")
    await start(a)
    name = a.directory._announcer.name
    a.kill()
    redis.heads.clear()
    redis.entries.clear()
    await b.directory.start()
    await until(lambda: name not in redis.listed)
    assert b.names() == []


async def test_news_that_nobody_understands_are_counted_and_ignored(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a"), make("b")
    a.keep(range(20))
    await start(a, b)
    for news in (b"", b"\xc1", b"{}", b"\x93" * 3000, msgspec.msgpack.encode(["c", ["a", "1"], 2, [b"short"], []])):
        redis.send(news)
    await until(lambda: b.count("directory_errors_total") == 5)
    assert agree(a, b)
    assert b.directory.health().trouble is None


async def test_closing_tells_the_others_even_while_much_waits(make: Make, redis: MemoryRedis) -> None:
    a, b = make("a"), make("b")
    await start(a, b)
    redis.delay_s = 0.01
    for n in range(50):
        a.keep([n] * 9)
    await a.directory.close()
    await until(lambda: b.names() == [])
    assert redis.entries.get(a.directory._announcer.name) is None


async def test_closing_ends_in_time_where_nothing_answers(make: Make, redis: MemoryRedis) -> None:
    a = make("a")
    await start(a)
    redis.delay_s = 60.0
    async with asyncio.timeout(PACE.leave_s + 1):
        await a.directory.close()
    redis.delay_s = 0.0


async def test_a_node_alone_finds_nothing() -> None:
    directory = LocalDirectory()
    await directory.start()
    assert directory.find(make_prompt_trace(range(20)), replay_tokens=8) == []
    assert directory.members() == []
    assert directory.health().trouble is None
    await directory.withdraw()
    await directory.close()

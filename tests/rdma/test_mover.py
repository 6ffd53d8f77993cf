"""Reading by RDMA, over a device that plans its faults: what comes is right, what fails is typed and gives all back."""

import asyncio
import os
import random
from collections.abc import AsyncIterator

import pytest

from dsuf.errors import PeerError, PeerLost
from dsuf.kv.blocks import map_memory
from dsuf.kv.handoff import Piece
from dsuf.kv.transport.queue_pair import QueuePairEnd, Read, RemoteMemory
from tests.rdma.fake import NEVER
from tests.rdma.rig import BLOCK, OFFER, Nodes


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    """Two nodes, of which nothing is left afterwards, not even a descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    made = Nodes()
    yield made
    await made.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_blocks_come_over(nodes: Nodes) -> None:
    """Scattered ones and neighbours, over one pair that is used again."""
    sources, targets = [5, 6, 7, 8, 9, 3, 60], [10, 11, 12, 13, 14, 2, 1]
    for _ in range(3):
        await nodes.read(sources, targets)
    assert nodes.has(sources, targets)
    assert nodes.said == ["connect"]


async def test_neighbours_are_read_together_and_cut_into_chunks(nodes: Nodes) -> None:
    await nodes.read([5, 6, 7, 8, 9, 3], [10, 11, 12, 13, 14, 2])
    assert [read.size_bytes // BLOCK for read in nodes.wire.reads] == [2, 2, 1, 1]


async def test_a_short_view_takes_the_beginning_of_its_block(nodes: Nodes) -> None:
    """Nothing is written behind it, and nothing at all into an empty one."""
    whole = nodes.near.blocks.view(4)
    views = [nodes.near.blocks.view(3), whole[:100], nodes.near.blocks.view(9)[:0]]
    await nodes.mover.read(OFFER, [Piece(1, 1), Piece(2, 1), Piece(3, 1)], views)
    assert bytes(whole) == bytes([3]) * 100 + bytes(BLOCK - 100)
    assert bytes(nodes.near.blocks.view(9)) == bytes(BLOCK)


async def test_reads_under_way_are_bounded(nodes: Nodes) -> None:
    nodes.wire.fault = lambda read: 0.001
    await nodes.read(range(0, 60, 2), range(0, 60, 2))
    assert nodes.wire.most_under_way == 4


async def test_pulls_of_a_peer_wait_for_a_pair(nodes: Nodes) -> None:
    nodes.wire.fault = lambda read: 0.001
    await asyncio.gather(*(nodes.read([i], [i]) for i in range(10)))
    assert nodes.has(range(10), range(10))
    assert nodes.said == ["connect"] * 2


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_read_ends_when_nothing_is_written_any_more(nodes: Nodes, times: int) -> None:
    """The device writes until the flush; however often somebody is impatient."""
    nodes.wire.fault = lambda read: NEVER
    nodes.wire.flush_s = 0.05
    reading = asyncio.create_task(nodes.read([1, 9], [1, 9]))
    await asyncio.sleep(0.01)
    for _ in range(times):
        reading.cancel()
        await asyncio.sleep(0.005)
    assert not reading.done()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert bytes(nodes.near.blocks.view(9)) == b"\xee" * BLOCK, "the last write came before the end"
    assert len(nodes.near.adapter) == 0
    await asyncio.sleep(0.01)
    assert nodes.said == ["connect", "disconnect"] and len(nodes.far.adapter) == 0


async def test_a_completion_that_never_comes(nodes: Nodes) -> None:
    """Nor does the flush: destroying the pair has to do."""
    nodes.wire.fault = lambda read: NEVER
    nodes.wire.flush_s = NEVER
    async with asyncio.timeout(20):
        with pytest.raises(PeerLost, match=r"nothing was read for 0\.2 s"):
            await nodes.read([1], [1])
    assert len(nodes.near.adapter) == 0


@pytest.mark.parametrize(
    ("status", "lost"), [("RETRY_EXC_ERR", True), ("REM_ACCESS_ERR", False), ("LOC_QP_OP_ERR", False)]
)
async def test_the_first_failure_counts(nodes: Nodes, status: str, lost: bool) -> None:
    """Those after it are flushed."""
    nodes.wire.fault = lambda read: status if read.remote == nodes.far.adapter.region.address + 4 * BLOCK else 0.0
    with pytest.raises(PeerError, match=status) as failed:
        await nodes.read([2, 4, 6, 8], [2, 4, 6, 8])
    assert isinstance(failed.value, PeerLost) == lost
    nodes.wire.fault = lambda read: 0.0
    await nodes.read([4], [4])
    assert nodes.has([4], [4])


async def test_what_breaks_one_pull_does_not_break_another(nodes: Nodes) -> None:
    bad = nodes.far.adapter.region.address + 7 * BLOCK
    nodes.wire.fault = lambda read: "REM_ACCESS_ERR" if read.remote == bad else 0.003
    good = asyncio.create_task(nodes.read(range(20, 40, 2), range(20, 40, 2)))
    with pytest.raises(PeerError):
        await nodes.read([7], [7])
    await good
    assert nodes.has(range(20, 40, 2), range(20, 40, 2))


@pytest.mark.parametrize("block", [-1, 64, 1 << 60])
async def test_blocks_that_cannot_be(nodes: Nodes, block: int) -> None:
    """Nothing is asked of the device."""
    with pytest.raises(PeerError, match="not in the peer's arena"):
        await nodes.read([block], [1])
    assert nodes.wire.reads == []


async def test_a_view_that_is_not_the_arenas(nodes: Nodes) -> None:
    with pytest.raises(PeerError, match="not the arena's"):
        await nodes.mover.read(OFFER, [Piece(1, 1)], [map_memory(BLOCK)])


async def test_memory_that_was_given_back(nodes: Nodes) -> None:
    await nodes.read([1], [1])
    nodes.far.adapter.region.close()
    with pytest.raises(PeerError, match="REM_ACCESS_ERR"):
        await nodes.read([2], [2])


async def test_the_fence_stops_a_reader(nodes: Nodes) -> None:
    """After it nothing more is read, though the reader goes on; later it can connect again."""
    nodes.wire.fault = lambda read: 0.005
    reading = asyncio.create_task(nodes.read(range(0, 40, 2), range(0, 40, 2)))
    await asyncio.sleep(0.02)
    nodes.owner.close()
    nodes.far.blocks.memory[:] = b"\xff" * len(nodes.far.blocks.memory)
    with pytest.raises(PeerLost, match="RETRY_EXC_ERR"):
        await reading
    assert b"\xff" not in bytes(nodes.near.blocks.memory)
    await nodes.read([1], [1])
    assert nodes.has([1], [1])


async def test_a_pair_that_was_destroyed_while_idle_is_replaced(nodes: Nodes) -> None:
    """Without a failure, but not for ever: where the new one fails too, that is it."""
    await nodes.read([1], [1])
    nodes.owner.close()
    await nodes.read([2], [2])
    assert nodes.has([2], [2]) and nodes.said.count("connect") == 2
    nodes.wire.fault = lambda read: "RETRY_EXC_ERR"
    with pytest.raises(PeerLost):
        await nodes.read([3], [3])
    assert nodes.said.count("connect") == 3


async def test_closing_fails_what_is_under_way(nodes: Nodes) -> None:
    nodes.wire.fault = lambda read: NEVER
    reading = asyncio.create_task(nodes.read([1], [1]))
    waiting = [asyncio.create_task(nodes.read([i], [i])) for i in (2, 3)]
    await asyncio.sleep(0.01)
    nodes.mover.close()
    for task in (reading, *waiting):
        with pytest.raises(PeerError, match="closed"):
            await task
    assert len(nodes.near.adapter) == 0
    with pytest.raises(PeerLost, match="closed"):
        await nodes.read([1], [1])


async def test_closing_the_fabric_first(nodes: Nodes) -> None:
    """Whoever reads hears of it; nothing is left."""
    nodes.wire.fault = lambda read: NEVER
    reading = asyncio.create_task(nodes.read([1], [1]))
    await asyncio.sleep(0.01)
    nodes.near.fabric.close()
    with pytest.raises(PeerError):
        await reading
    with pytest.raises(PeerError):
        await nodes.read([1], [1])


async def test_connecting_that_fails_or_is_given_up(nodes: Nodes) -> None:
    """Even where the peer has done it, and nobody hears of that."""
    accept = nodes.owner.accept

    async def slow(end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        made = accept(end)
        await asyncio.sleep(10)
        return made

    nodes.mover._connect = slow
    reading = asyncio.create_task(nodes.read([1], [1]))
    await asyncio.sleep(0.01)
    assert len(nodes.far.adapter) == 1
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(0.01)
    assert len(nodes.near.adapter) == len(nodes.far.adapter) == 0

    async def refuse(end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        raise PeerError("no")

    nodes.mover._connect = refuse
    with pytest.raises(PeerError, match="no"):
        await nodes.read([1], [1])
    assert len(nodes.near.adapter) == 0


async def test_an_end_that_makes_no_sense(nodes: Nodes) -> None:
    """At either side."""
    bad = QueuePairEnd(number=1, first_packet=1, gid="nonsense", mtu=3, reads=1)
    with pytest.raises(PeerError):
        nodes.owner.accept(bad)

    async def answer(end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        return bad, nodes.far.adapter.memory

    nodes.mover._connect = answer
    with pytest.raises(PeerError, match="makes no sense"):
        await nodes.read([1], [1])


async def test_a_peer_has_so_many_pairs_and_no_more(nodes: Nodes) -> None:
    """One that is asked for again takes the place of the earlier one."""
    ends = [QueuePairEnd(number=number, first_packet=1, gid="::1", mtu=3, reads=1) for number in range(9)]
    for end in (*ends[:8], *ends[:8]):
        nodes.owner.accept(end)
    with pytest.raises(PeerError, match="more than 8"):
        nodes.owner.accept(ends[8])
    assert len(nodes.far.adapter) == 8


async def test_a_peer_that_speaks_another_way(nodes: Nodes) -> None:
    assert nodes.near.fabric.mover(b"rdma 2", nodes.connect, nodes.disconnect) is None


async def test_any_faults_and_cancels(nodes: Nodes) -> None:
    """What is said to be there is there, and a block that was given back is written no more."""
    chance = random.Random(5)

    def fault(read: Read) -> float | str:
        if chance.random() < 0.05:
            return chance.choice(("REM_ACCESS_ERR", "RETRY_EXC_ERR", NEVER))
        return chance.choice((0.0, 0.0005))

    async def pull(number: int) -> str:
        targets = range(number * 8, number * 8 + 8)
        sources = chance.sample(range(64), 8)
        for target in targets:
            nodes.near.blocks.view(target)[:] = bytes(BLOCK)
        try:
            async with asyncio.timeout(chance.choice((0.001, 0.005, 1))):
                await nodes.read(sources, targets)
        except (PeerError, TimeoutError):
            own = [bytes(nodes.near.blocks.view(target)) for target in targets]
            await asyncio.sleep(0.003)
            assert own == [bytes(nodes.near.blocks.view(target)) for target in targets], "written after the end"
            return "failed"
        assert nodes.has(sources, targets)
        return "whole"

    nodes.wire.fault, nodes.wire.flush_s = fault, 0.002
    ends: list[str] = []
    for turn in range(60):
        if turn % 7 == 6:
            nodes.owner.close()
        ends += await asyncio.gather(*(pull(number) for number in range(4)))
    assert ends.count("whole") > 20 and ends.count("failed") > 20
    assert len(nodes.far.adapter) <= 8

"""What is tried in the test machines over real verbs: each case is a function that fails by raising.

python3 -m tests.rdma.cases [NAME...]     # on the only machine, or on the second of two
"""

import asyncio
import contextlib
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from dsuf.errors import CommandError, DeviceError, PeerError, PeerLost
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.point import seal
from dsuf.kv.transport.adapter import Adapter, open_adapter
from dsuf.kv.transport.queue_pair import QueuePairEnd, RemoteMemory
from dsuf.kv.transport.rdma import Pace, RdmaFabric, RdmaMover
from dsuf.kv.transport.verbs import VerbsDevice
from dsuf.types import Extent
from tests.rdma.owner import BLOCK, BLOCKS, Control
from tests.rdma.report import Report, try_all

PACE = Pace(chunk_bytes=256 << 10, reads=4, stall_s=4.0, flush_s=2.0)
CASE_S = 40.0
OFFER = Offer(
    id=0, head=b"", ids=b"", extent=Extent(key=b"", start=0, stop=0, source="peer"), pages=(), checksums=()
)  # fmt: skip
ALL = range(BLOCKS)


class Reader:
    """The node that reads. `change` may change what the owner says of its memory."""

    def __init__(self, control: Control) -> None:
        self.blocks = Blocks(BLOCK, map_memory(BLOCK * BLOCKS))
        self.adapter = Adapter(VerbsDevice(os.environ["DSUF_ADDRESS"]), self.blocks.memory, BLOCK)
        self.fabric = RdmaFabric(self.adapter, PACE)
        self.control = control
        self.lock = asyncio.Lock()
        self.change: dict[str, int] = {}
        mover = self.fabric.mover(self.fabric.describe(), self.connect, self.disconnect)
        assert isinstance(mover, RdmaMover)
        self.mover = mover

    async def ask(self, name: str, *arguments: Any) -> Any:
        async with self.lock:
            return await self.control.ask(name, *arguments)

    async def connect(self, end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        answer = await self.ask("connect", msgspec.to_builtins(end))
        other, memory = msgspec.convert(answer, tuple[QueuePairEnd, RemoteMemory])
        return other, msgspec.structs.replace(memory, **self.change)

    async def disconnect(self, number: int) -> None:
        await self.ask("disconnect", number)

    async def read(self, blocks: Sequence[int] = ALL) -> None:
        """Blocks of the owner into those of the same numbers."""
        await self.mover.read(OFFER, [Piece(block, 1) for block in blocks], [self.blocks.view(b) for b in blocks])

    async def begin(self) -> "asyncio.Task[None]":
        """Read everything; this returns when some of it is there, and some is not."""
        reading = asyncio.create_task(self.read())
        while self.blocks.view(1)[:8] == bytes(8):  # noqa: ASYNC110 - memory has no event
            await asyncio.sleep(0)
        assert not reading.done()
        return reading

    async def is_whole(self, blocks: Sequence[int] = ALL) -> bool:
        """Whether they are what the owner has."""
        return [seal(self.blocks.view(b)) for b in blocks] == await self.ask("digests", list(blocks))

    def holds(self, seed: int) -> bool:
        """Whether any block begins with the pattern of `seed`, or has some of it within."""
        marks = ((seed * 1_000_003 + block).to_bytes(8, "little") for block in ALL)
        return any(mark in bytes(self.blocks.view(block)) for block, mark in zip(ALL, marks, strict=True))


Case = Callable[[Reader], Awaitable[str]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Try it under its name."""
    CASES[function.__name__] = function
    return function


async def fails(reading: Awaitable[None], *texts: str, within_s: float = 10.0) -> str:
    """How a read failed: with one of `texts`, within the time."""
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(CASE_S):
            await reading
    except PeerError as error:
        took_s = time.monotonic() - started_s
        assert any(text in str(error) for text in texts), error
        assert took_s < within_s, took_s
        return f"{error} after {took_s:.2f} s"
    raise AssertionError("the read succeeded")


@case
async def caches_come_over(reader: Reader) -> str:
    """Small, odd, scattered and large; the same pair serves all of them."""
    sizes = [[7], [3, 2, 1, 400, 9], list(range(1, BLOCKS, 2)), list(ALL)]
    started_s = time.monotonic()
    for blocks in sizes:
        await reader.read(blocks)
        assert await reader.is_whole(blocks)
    mib_s = sum(map(len, sizes)) * BLOCK / (time.monotonic() - started_s) / (1 << 20)
    assert len(reader.adapter) == 1 == await reader.ask("pairs")
    return f"{mib_s:.1f} MiB/s with checksums"


@case
async def part_of_a_block(reader: Reader) -> str:
    """Nothing is written behind what was asked for."""
    await reader.mover.read(OFFER, [Piece(5, 1)], [reader.blocks.view(6)[:12345]])
    assert bytes(reader.blocks.view(6)[12345:]) == bytes(BLOCK - 12345)
    assert bytes(reader.blocks.view(6)[:8]) == (1_000_003 + 5).to_bytes(8, "little")
    return "ok"


@case
async def two_at_a_time(reader: Reader) -> str:
    """Each has a pair to itself."""
    await asyncio.gather(reader.read(range(100)), reader.read(range(200, 300)), reader.read(range(400, 420)))
    assert await reader.is_whole([*range(100), *range(200, 300), *range(400, 420)])
    assert len(reader.adapter) == 2
    return "ok"


@case
async def out_of_range(reader: Reader) -> str:
    """The owner's device refuses; the next pull has a pair of its own."""
    reader.change = {"size_bytes": 1 << 40}
    beyond = reader.mover.read(OFFER, [Piece(BLOCKS, 1)], [reader.blocks.view(0)])
    text = await fails(beyond, "REM_ACCESS_ERR", within_s=3)
    reader.change = {}
    await reader.read([1])
    assert await reader.is_whole([1])
    return text


@case
async def wrong_key(reader: Reader) -> str:
    reader.change = {"key": 0x12345}
    return await fails(reader.read([1]), "REM_ACCESS_ERR", within_s=3)


@case
async def memory_given_back_before(reader: Reader) -> str:
    await reader.read([1])
    await reader.ask("deregister")
    return await fails(reader.read([1]), "REM_ACCESS_ERR", "RETRY_EXC_ERR", within_s=5)


@case
async def memory_given_back_meanwhile(reader: Reader) -> str:
    """A device may answer with an error, or not at all."""
    reading = await reader.begin()
    await reader.ask("deregister")
    return await fails(reading, "REM_ACCESS_ERR", "RETRY_EXC_ERR", "nothing was read", within_s=12)


@case
async def killed_before(reader: Reader) -> str:
    """Nobody is there who could join a new pair either."""
    await reader.read([1])
    reader.control.tell("die")
    await asyncio.sleep(0.5)
    try:
        await fails(reader.read([2]), "RETRY_EXC_ERR", "nothing was read", within_s=12)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        return f"{type(error).__name__} of the control connection"
    return "no pair"


@case
async def killed_meanwhile(reader: Reader) -> str:
    reading = await reader.begin()
    reader.control.tell("die")
    return await fails(reading, "RETRY_EXC_ERR", "nothing was read", within_s=12)


@case
async def frozen(reader: Reader) -> str:
    """A stopped process is read from all the same: only the control connection tells that it is not there."""
    await reader.read([1])
    reader.control.tell("freeze", 3.0)
    await asyncio.sleep(0.3)
    started_s = time.monotonic()
    await reader.read(range(50))
    took_s = time.monotonic() - started_s
    await reader.ask("pairs")
    waited_s = time.monotonic() - started_s
    return f"read after {took_s:.2f} s, answer after {waited_s:.2f} s"


@case
async def fenced(reader: Reader) -> str:
    """A lease runs out during a pull, and the blocks are used for something else: an error, and none of that."""
    reading = await reader.begin()
    await reader.ask("fence")
    text = await fails(reading, "RETRY_EXC_ERR", "REM_INV_REQ_ERR", "nothing was read", within_s=12)
    assert not reader.holds(2), "rows of something else were read"
    await reader.read([9])
    assert await reader.is_whole([9]), "and it can connect again"
    return text


@case
async def overwritten_without_a_fence(reader: Reader) -> str:
    """Reading succeeds, torn: that is what checksums are for."""
    await reader.read([0])
    before = [seal(reader.blocks.view(0))]
    reading = await reader.begin()
    await reader.ask("rewrite")
    await reading
    after = await reader.ask("digests", list(ALL))
    mine = [seal(reader.blocks.view(block)) for block in ALL]
    assert before != after[:1]
    new = sum(a == b for a, b in zip(mine, after, strict=True))
    return f"no error, {new} of {BLOCKS} blocks are new"


@case
async def cancelled(reader: Reader) -> str:
    """When it has ended, the blocks are the reader's: what is put there stays."""
    reading = await reader.begin()
    started_s = time.monotonic()
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    took_s = time.monotonic() - started_s
    assert took_s < PACE.flush_s + 1, took_s
    reader.blocks.memory[:] = b"\x77" * len(reader.blocks.memory)
    await asyncio.sleep(1.0)
    assert bytes(reader.blocks.memory) == b"\x77" * len(reader.blocks.memory), "written after the end"
    assert len(reader.adapter) == 0
    await reader.read([3])
    assert await reader.is_whole([3])
    return f"ended after {took_s * 1e3:.0f} ms"


@case
async def any_pulls_and_cancels(reader: Reader) -> str:
    """What came is right, what was given up is written no more, and no pair is left of either."""
    chance = random.Random(3)

    async def pull(targets: range) -> bool:
        sources = chance.sample(ALL, len(targets))
        views = [reader.blocks.view(target) for target in targets]
        try:
            async with asyncio.timeout(chance.choice((0.005, 0.02, 0.1, 10))):
                await reader.mover.read(OFFER, [Piece(source, 1) for source in sources], views)
        except TimeoutError:
            marks = [bytes([number % 251]) * BLOCK for number in targets]
            for view, mark in zip(views, marks, strict=True):
                view[:] = mark
            await asyncio.sleep(0.2)
            assert all(view == mark for view, mark in zip(views, marks, strict=True)), "written after the end"
            return False
        assert [seal(view) for view in views] == await reader.ask("digests", sources)
        return True

    ends: list[bool] = []
    for _ in range(12):
        ends += await asyncio.gather(*(pull(range(start, start + 24)) for start in (0, 100, 200)))
    await asyncio.sleep(0.5)
    assert len(reader.adapter) <= PACE.pairs and await reader.ask("pairs") <= PACE.pairs
    assert 5 < sum(ends) < len(ends) - 5, ends
    return f"{sum(ends)} of {len(ends)} came over"


@case
async def control_lost_meanwhile(reader: Reader) -> str:
    """The owner destroys what a peer held that is gone."""
    reading = await reader.begin()
    reader.control.close()
    return await fails(reading, "RETRY_EXC_ERR", "nothing was read", "REM_ACCESS_ERR", within_s=12)


@case
async def closed_meanwhile(reader: Reader) -> str:
    reading = await reader.begin()
    reader.mover.close()
    return await fails(reading, "closed", within_s=3)


@case
async def owner_serves_one_read_at_a_time(reader: Reader) -> str:
    await reader.ask("serve_one_read")
    await reader.read(range(64))
    assert await reader.is_whole(range(64))
    return "ok"


@case
async def link_lost(reader: Reader) -> str:
    """For longer than packets are sent again: an error, or the deadline while a new pair is asked for.
    Afterwards all is well."""
    if os.environ["DSUF_NODES"] == "1":
        return "one machine has no link"
    await reader.ask("cut_link", 6.0)
    started_s = time.monotonic()
    text = ""
    while not text and time.monotonic() - started_s < 6:
        try:
            async with asyncio.timeout(3):
                await reader.read(range(64))
        except (PeerLost, TimeoutError) as error:
            text = f"{error!r} after {time.monotonic() - started_s:.1f} s"
    assert text, "nothing was lost"
    await asyncio.sleep(max(0.0, 7 - (time.monotonic() - started_s)))
    await reader.read([1])
    assert await reader.is_whole([1])
    return text


@case
async def link_lost_briefly(reader: Reader) -> str:
    """For a shorter time than that: it only takes longer."""
    if os.environ["DSUF_NODES"] == "1":
        return "one machine has no link"
    await reader.ask("cut_link", 0.5)
    started_s = time.monotonic()
    while time.monotonic() - started_s < 1.5:
        await reader.read()
        assert await reader.is_whole()
    assert len(reader.adapter) == 1
    return f"{time.monotonic() - started_s:.1f} s"


@case
async def address_of_no_port(reader: Reader) -> str:
    """TCP, with the reason; fatal where RDMA is required."""
    assert open_adapter(map_memory(4096), 4096, "127.0.0.1") is None
    try:
        open_adapter(map_memory(4096), 4096, "127.0.0.1", wanted="rdma")
    except CommandError as error:
        assert "no RDMA device has the address 127.0.0.1 (rxe0)" in str(error), error
        return str(error)
    raise AssertionError("there is no such port")


@case
async def locked_memory(reader: Reader) -> str:
    """Found out before by the limit, and by the device where it is not."""
    code = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "from tests.rdma.cases import too_much_memory\n"
        "print(too_much_memory())\n"
    )
    os.chmod("/dev/infiniband/uverbs0", 0o666)
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def too_much_memory() -> str:
    """What is said of 8 MiB where 4 are allowed."""
    memory = map_memory(8 << 20)
    texts = []
    try:
        open_adapter(memory, 4096, os.environ["DSUF_ADDRESS"], wanted="rdma")
    except CommandError as error:
        texts.append(str(error))
    device = VerbsDevice(os.environ["DSUF_ADDRESS"])
    try:
        device.register(memory)
    except DeviceError as error:
        texts.append(str(error))
    device.close()
    assert len(texts) == 2 and "may lock 4 MiB" in texts[0] and "Errno: 12" in texts[1], texts
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == 4 << 20
    return "; ".join(texts)


@case
async def left_open_at_the_end(reader: Reader) -> str:
    """The interpreter's end closes what is open, and does not crash on it."""
    code = (
        "import os\n"
        "from dsuf.kv.blocks import map_memory\n"
        "from dsuf.kv.transport.adapter import open_adapter\n"
        "opened = open_adapter(map_memory(1 << 20), 4096, os.environ['DSUF_ADDRESS'], wanted='rdma')\n"
        "pairs = [opened.make_pair(n) for n in (0, 1, 16)]\n"
        "print('made', len(opened))\n"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "made 3\n"), (done.returncode, done.stdout, done.stderr)
    return "ok"


async def try_one(name: str) -> str:
    """One case, with a connection and an arena of its own."""
    alone = os.environ["DSUF_NODES"] == "1"
    control = await Control.open(os.environ["DSUF_ADDRESS" if alone else "DSUF_OTHER"])
    reader = Reader(control)
    try:
        return await CASES[name](reader)
    finally:
        reader.mover.close()
        await asyncio.sleep(0.05)
        left = len(reader.adapter)
        reader.fabric.close()
        control.close()
        assert not left, f"{left} queue pairs are left"


def main(names: Sequence[str]) -> list[Report]:
    """Try the cases; they are in the file `report.reads`."""
    return asyncio.run(try_all("reads", names or list(CASES), try_one, CASE_S))


if __name__ == "__main__":
    sys.exit(0 if all(report.good for report in main(sys.argv[1:])) else 1)

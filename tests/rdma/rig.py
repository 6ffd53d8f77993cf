"""Two nodes' arenas with devices on one wire, joined by calls instead of a control connection."""

import asyncio
from collections.abc import Sequence

from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.transport.adapter import Adapter
from dsuf.kv.transport.queue_pair import QueuePairEnd, RemoteMemory
from dsuf.kv.transport.rdma import Pace, RdmaFabric, RdmaMover
from dsuf.types import Extent
from tests.rdma.fake import FakeDevice, Wire

BLOCK = 256
OFFER = Offer(
    id=0, head=b"", ids=b"", extent=Extent(key=b"", start=0, stop=0, source="peer"), pages=(), checksums=()
)  # fmt: skip
PACE = Pace(pairs=2, reads=4, chunk_bytes=2 * BLOCK, stall_s=0.2, flush_s=0.1)


class Side:
    """One node: memory full of its own pattern, and its fabric."""

    def __init__(self, wire: Wire, address: str, blocks: int, pace: Pace) -> None:
        self.blocks = Blocks(BLOCK, map_memory(BLOCK * blocks))
        self.device = FakeDevice(wire, address)
        self.adapter = Adapter(self.device, self.blocks.memory, BLOCK)
        self.fabric = RdmaFabric(self.adapter, pace)


class Nodes:
    """A reader and an owner. `said` are the calls between them; `connect_s` is how long connecting takes."""

    def __init__(self, blocks: int = 64, pace: Pace = PACE) -> None:
        self.wire = Wire()
        self.near, self.far = Side(self.wire, "10.0.0.1", blocks, pace), Side(self.wire, "10.0.0.2", blocks, pace)
        for block in range(blocks):
            self.far.blocks.view(block)[:] = bytes([block + 1]) * BLOCK
        self.owner = self.far.fabric.owner()
        self.said: list[str] = []
        self.connect_s = 0.0
        mover = self.near.fabric.mover(self.far.fabric.describe(), self.connect, self.disconnect)
        assert isinstance(mover, RdmaMover)
        self.mover = mover

    async def connect(self, end: QueuePairEnd) -> tuple[QueuePairEnd, RemoteMemory]:
        self.said.append("connect")
        await asyncio.sleep(self.connect_s)
        return self.owner.accept(end)

    async def disconnect(self, number: int) -> None:
        self.said.append("disconnect")
        self.owner.destroy(number)

    async def read(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Read blocks `sources` of the owner into blocks `targets` of the reader."""
        pieces = [Piece(block, 1) for block in sources]
        await self.mover.read(OFFER, pieces, [self.near.blocks.view(block) for block in targets])

    def has(self, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """Whether they are there."""
        views = zip(sources, targets, strict=True)
        return all(self.near.blocks.view(target) == self.far.blocks.view(source) for source, target in views)

    async def close(self) -> None:
        """Everything ends, and nothing is left."""
        self.mover.close()
        self.owner.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(self.near.adapter) == len(self.far.adapter) == 0
        for side in (self.near, self.far):
            side.fabric.close()
            assert not side.device.open and not side.device.held
        assert not self.wire.pairs and not self.wire.regions

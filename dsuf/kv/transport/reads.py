"""Which reads bring blocks of a peer's arena into this one: few large ones, none too large."""

from collections.abc import Iterator, Sequence

from dsuf.errors import PeerError
from dsuf.kv.handoff import Piece
from dsuf.kv.transport.adapter import Adapter
from dsuf.kv.transport.queue_pair import Read, RemoteMemory


def plan_reads(
    adapter: Adapter, memory: RemoteMemory, pieces: Sequence[Piece], into: Sequence[memoryview], chunk_bytes: int
) -> Iterator[Read]:  # fmt: skip
    """The reads that fill `into` from the blocks of `pieces` in a peer's `memory`: what lies side by side at both ends
    is read together, up to `chunk_bytes`. Raises `PeerError` for blocks that cannot be."""
    last = Read(0, 0, 0)
    for piece, view in zip(pieces, into, strict=True):
        start, size = piece.block * memory.block_bytes, len(view)
        if not 0 <= start <= memory.size_bytes - size or size > memory.block_bytes:
            raise PeerError(f"block {piece.block} is not in the peer's arena")
        if not size:
            continue
        read = Read(memory.address + start, adapter.address_of(view), size)
        if (last.remote + last.size_bytes, last.local + last.size_bytes) == read[:2]:
            last = last._replace(size_bytes=last.size_bytes + size)
        else:
            yield from _cut(last, chunk_bytes)
            last = read
    yield from _cut(last, chunk_bytes)


def _cut(read: Read, chunk_bytes: int) -> Iterator[Read]:
    """`read` in parts of up to `chunk_bytes`."""
    for at in range(0, read.size_bytes, chunk_bytes):
        yield Read(read.remote + at, read.local + at, min(chunk_bytes, read.size_bytes - at))

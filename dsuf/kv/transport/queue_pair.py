"""What moving bytes by RDMA needs of a device, and what two nodes tell each other to join two queue pairs.

Only reading is asked for, and only by reliable connections. Device, memory and pairs are closed by who made them, pairs
first; closing is idempotent. Each call may raise `DeviceError`.
"""

from typing import Annotated, NamedTuple, Protocol

import msgspec

Number24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class QueuePairEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a connection: number of the pair, that of its first packet, address of the port (`gid`, as IPv6), code
    of the largest packet (1: 256 bytes, each next one twice as much), and how many reads it serves at a time."""

    number: Number24
    first_packet: Number24
    gid: Annotated[str, msgspec.Meta(max_length=45)]
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    reads: Annotated[int, msgspec.Meta(ge=1, le=255)]


class RemoteMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The arena of the other node: where its blocks of `block_bytes` lie for who has the `key`."""

    address: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Read(NamedTuple):
    """One read: from address `remote` of the other node to address `local` of this one."""

    remote: int
    local: int
    size_bytes: int


class Completion(NamedTuple):
    """The end of read number `read`; `status` is empty if it succeeded, else the device's name for what happened."""

    read: int
    status: str


class Region(Protocol):
    """Memory that the device may write, and that others may read who have its `remote_key`."""

    address: int
    size_bytes: int
    remote_key: int

    def close(self) -> None:
        """Nobody may any more."""


class Pair(Protocol):
    """A queue pair. `descriptor` can be read from when reads have ended; -1 where the pair was made for none."""

    end: QueuePairEnd
    descriptor: int

    def connect(self, other: QueuePairEnd) -> None:
        """Join it with `other`; from then on both can read."""

    def read(self, number: int, read: Read, region: Region, key: int) -> None:
        """Begin to read into `region`; no more than the pair was made for may be under way."""

    def take(self) -> list[Completion]:
        """Reads that have ended. The descriptor tells of those after them."""

    def fail(self) -> None:
        """Break off all reads: each ends soon, if only with an error."""

    def close(self) -> None:
        """End the connection. When this returns, nothing is read or written through it any more."""


class Device(Protocol):
    """A port of an adapter, or of software that does as if it were one; `name` is for people. A single read may be as
    large as `most_bytes`."""

    name: str
    most_bytes: int

    def register(self, memory: memoryview) -> Region:
        """Let the device use `memory`, which must stay where it is until the region is closed."""

    def make_pair(self, reads: int) -> Pair:
        """A pair that has `reads` reads under way at most; with 0 it only serves those of the other end."""

    def close(self) -> None:
        """Give the device back."""

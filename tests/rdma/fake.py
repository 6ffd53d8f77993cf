"""A device that moves bytes within the process and keeps the rules of a real one, with planned faults.

Reads through a pair end in order. A failed one puts the pair in error, and those after it are flushed. A read may write
as long as it has not ended and its pair is there; whoever has taken the memory back by then finds out.
"""

import asyncio
import ctypes
import ipaddress
import os
from collections import deque
from collections.abc import Callable
from itertools import count

from dsuf.errors import DeviceError
from dsuf.kv.transport.queue_pair import Completion, QueuePairEnd, Read, Region

NEVER = float("inf")
LOST_S = 0.02
"""After which a read that nobody answers is given up."""


class Wire:
    """What connects devices. `fault` gives for each read the seconds that it takes (`NEVER`), or the status with which
    it fails; `flush_s` passes until a pair that was broken off has flushed its reads, during which it goes on writing.
    """

    def __init__(self) -> None:
        self.regions: dict[int, FakeRegion] = {}
        self.pairs: dict[tuple[str, int], FakePair] = {}
        self.numbers = count(1)
        self.fault: Callable[[Read], float | str] = lambda read: 0.0
        self.flush_s = 0.0
        self.reads: list[Read] = []
        self.most_under_way = 0


class FakeDevice:
    """Implements `Device` at `address`."""

    name = "fake0"

    def __init__(self, wire: Wire, address: str, most_bytes: int = 1 << 23) -> None:
        self.wire, self.most_bytes, self.open = wire, most_bytes, True
        self.gid = str(ipaddress.ip_address(f"::ffff:{address}"))
        self.held: set[object] = set()

    def register(self, memory: memoryview) -> Region:
        return FakeRegion(self, memory)

    def make_pair(self, reads: int) -> "FakePair":
        if not self.open:
            raise DeviceError("closed")
        return FakePair(self, reads)

    def close(self) -> None:
        assert not self.held, "pairs and memory come first"
        self.open = False


class FakeRegion:
    """Implements `Region`."""

    def __init__(self, device: FakeDevice, memory: memoryview) -> None:
        self.device, self.hold = device, (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address, self.size_bytes = ctypes.addressof(self.hold), len(memory)
        self.remote_key = next(device.wire.numbers) << 8
        device.wire.regions[self.remote_key] = self
        device.held.add(self)

    def close(self) -> None:
        if self.device.wire.regions.pop(self.remote_key, None):
            self.device.held.remove(self)
            del self.hold

    def holds(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes


class FakePair:
    """Implements `Pair`."""

    def __init__(self, device: FakeDevice, reads: int) -> None:
        self.device, self.room, self.state = device, reads, "init"
        self.end = QueuePairEnd(
            number=next(device.wire.numbers), first_packet=7, gid=device.gid, mtu=3, reads=16
        )  # fmt: skip
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK) if reads else -1
        self.other: QueuePairEnd | None = None
        self.queue: deque[tuple[int, Read, Region, int]] = deque()
        self.ended: list[Completion] = []
        device.wire.pairs[device.gid, self.end.number] = self
        device.held.add(self)

    def connect(self, other: QueuePairEnd) -> None:
        if self.state != "init":
            raise DeviceError(f"connect in {self.state}")
        ipaddress.IPv6Address(other.gid)
        self.other, self.state = other, "ready"

    def read(self, number: int, read: Read, region: Region, key: int) -> None:
        if self.state not in ("ready", "error") or len(self.queue) >= self.room:
            raise DeviceError(f"post in {self.state}, {len(self.queue)} under way")
        self.device.wire.reads.append(read)
        self.queue.append((number, read, region, key))
        self.device.wire.most_under_way = max(self.device.wire.most_under_way, len(self.queue))
        if self.state == "error":
            self._flush()
        elif len(self.queue) == 1:
            self._begin()

    def take(self) -> list[Completion]:
        if self.descriptor >= 0 and self.ended:
            os.eventfd_read(self.descriptor)
        ended, self.ended = self.ended, []
        return ended

    def fail(self) -> None:
        if self.state == "closed":
            raise DeviceError("closed")
        self.state = "error"
        if self.device.wire.flush_s != NEVER:
            self._later(self.device.wire.flush_s, self._flush)

    def close(self) -> None:
        if self.state == "closed":
            return
        self.state = "closed"
        del self.device.wire.pairs[self.device.gid, self.end.number]
        self.device.held.remove(self)
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, then)

    def _begin(self) -> None:
        """The first read of the queue is on its way."""
        fault = self.device.wire.fault(self.queue[0][1])
        if isinstance(fault, str):
            self._later(0.001, lambda: self._break(fault))
        elif fault != NEVER:
            self._later(fault, self._finish)

    def _finish(self) -> None:
        """The bytes of the first read have come, unless nobody serves them."""
        if self.state == "closed" or not self.queue:
            return
        number, read, region, key = self.queue[0]
        other = self.device.wire.pairs.get((self.other.gid, self.other.number)) if self.other else None
        joined = other is not None and other.state == "ready" and other.other is not None
        if not joined or other is None or other.other is None or other.other.number != self.end.number:
            self._later(LOST_S, lambda: self._break("RETRY_EXC_ERR"))
            return
        source = self.device.wire.regions.get(key)
        if source is None or source.device is not other.device or not source.holds(read.remote, read.size_bytes):
            self._break("REM_ACCESS_ERR")
            return
        assert isinstance(region, FakeRegion) and region.holds(read.local, read.size_bytes)
        ctypes.memmove(read.local, read.remote, read.size_bytes)
        if self.state == "error":
            return  # it has written, and will be flushed all the same
        self.queue.popleft()
        self._tell(Completion(number, ""))
        if self.queue:
            self._begin()

    def _break(self, status: str) -> None:
        """The first read failed, and with it the pair."""
        if self.state == "ready" and self.queue:
            self.state = "error"
            self._tell(Completion(self.queue.popleft()[0], status))
            self._flush()

    def _flush(self) -> None:
        """What is left ends with an error. What was on its way writes in the last moment."""
        while self.queue and self.state != "closed":
            number, read, _, _ = self.queue.popleft()
            ctypes.memset(read.local, 0xEE, read.size_bytes)
            self._tell(Completion(number, "WR_FLUSH_ERR"))

    def _tell(self, completion: Completion) -> None:
        if self.state != "closed":
            self.ended.append(completion)
            os.eventfd_write(self.descriptor, 1)

"""The RDMA device of a node with its arena: registered once, and given back in order whatever happens."""

import atexit
import ctypes
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dsuf.errors import CommandError, DeviceError
from dsuf.kv.transport.queue_pair import Device, Pair, QueuePairEnd, RemoteMemory
from dsuf.kv.transport.verbs import VerbsDevice
from dsuf.observe.log import log_event

Wanted = Literal["auto", "tcp", "rdma"]
MIB = 1 << 20
_CAP_IPC_LOCK = 14


class Adapter:
    """`memory`, which is cut into blocks of `block_bytes`, registered with `device`, and all queue pairs of the node.

    Registering pins the memory, all of it. Raises `DeviceError`. Where `close` is not called, the interpreter's end
    does it.
    """

    def __init__(self, device: Device, memory: memoryview, block_bytes: int) -> None:
        self.device, self._block_bytes = device, block_bytes
        self._pairs: set[Pair] = set()
        try:
            self.region = device.register(memory)
        except BaseException:
            device.close()
            raise
        self._open = True
        atexit.register(self.close)

    @property
    def memory(self) -> RemoteMemory:
        """What who reads here has to know; its key opens the whole arena."""
        region = self.region
        return RemoteMemory(
            address=region.address, size_bytes=region.size_bytes, key=region.remote_key, block_bytes=self._block_bytes
        )

    def __len__(self) -> int:
        """Queue pairs that are there."""
        return len(self._pairs)

    def address_of(self, view: memoryview) -> int:
        """Where `view` begins; raises `DeviceError` unless all of it is registered."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        start = address - self.region.address
        if not 0 <= start <= self.region.size_bytes - len(view):
            raise DeviceError("memory that is not the arena's cannot be read into by RDMA")
        return address

    def make_pair(self, reads: int) -> Pair:
        """A queue pair, until `drop_pair`; raises `DeviceError`."""
        if not self._open:
            raise DeviceError("the RDMA device is closed")
        pair = self.device.make_pair(reads)
        self._pairs.add(pair)
        return pair

    def accept_pair(self, other: QueuePairEnd) -> Pair:
        """A queue pair that serves the reads of `other`."""
        pair = self.make_pair(0)
        try:
            pair.connect(other)
        except BaseException:
            self.drop_pair(pair)
            raise
        return pair

    def drop_pair(self, pair: Pair) -> None:
        """Destroy `pair`; when this returns, nothing is read or written through it. Idempotent."""
        self._pairs.discard(pair)
        pair.close()

    def close(self) -> None:
        """Destroy all pairs, then give memory and device back; idempotent. What fails is logged, and the rest goes on:
        objects that are left open can end the interpreter with a crash."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        for end in (*(pair.close for pair in self._pairs), self.region.close, self.device.close):
            try:
                end()
            except DeviceError as error:
                log_event("rdma not closed", level="warning", error=error)
        self._pairs.clear()


def open_adapter(
    memory: memoryview, block_bytes: int, host: str, *, wanted: Wanted = "auto",
    find: Callable[[str], Device] = VerbsDevice,
) -> Adapter | None:  # fmt: skip
    """The RDMA port with the address of `host`, and `memory` registered with it; None where TCP is to be used, which is
    logged with its reason. All of `memory` is written on the way, so it must not be in use, and it takes a while.

    Raises `CommandError` where RDMA is wanted and cannot be had.
    """
    if wanted == "tcp":
        return None
    try:
        adapter = _open(memory, block_bytes, host, find)
    except DeviceError as reason:
        if wanted == "rdma":
            raise CommandError(f"transport = rdma: {reason}") from reason
        log_event("caches travel over tcp", reason=str(reason))
        return None
    log_event("caches travel by rdma", device=adapter.device.name, host=host, arena_mib=len(memory) // MIB)
    return adapter


def _open(memory: memoryview, block_bytes: int, host: str, find: Callable[[str], Device]) -> Adapter:
    """As `open_adapter`; raises `DeviceError` with the reason."""
    if not len(memory):
        raise DeviceError("there is no host cache to read (cache_bytes)")
    try:
        address = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise DeviceError(f"{host} has no address: {error}") from error
    device = find(str(address))
    try:
        check_memlock(len(memory))
    except BaseException:
        device.close()
        raise
    # Registering holds the interpreter's lock, and is fast only for pages that are there.
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, len(memory))
    return Adapter(device, memory, block_bytes)


def check_memlock(size_bytes: int) -> None:
    """Raise `DeviceError` where this process may not pin so much memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or size_bytes <= limit or _may_lock():
        return
    raise DeviceError(
        f"the host cache has {size_bytes // MIB} MiB, but this process may lock {limit // MIB} MiB "
        "(ulimit -l; systemd: LimitMEMLOCK=infinity)"
    )


def _may_lock() -> bool:
    """Whether the limit does not hold for this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) >> _CAP_IPC_LOCK & 1)

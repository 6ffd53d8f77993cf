"""RDMA verbs by pyverbs, which a system has or has not: the only module that knows it.

pyverbs comes with the system's libibverbs (Debian: python3-pyverbs and ibverbs-providers), never from an index. It
holds the interpreter's lock in every call, so nothing here waits; and it must not be left to the interpreter's end to
close its objects.
"""

import ctypes
import fcntl
import ipaddress
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dsuf.errors import DeviceError
from dsuf.kv.transport.queue_pair import Completion, Pair, QueuePairEnd, Read, Region

try:
    import pyverbs.enums as enums
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, SendWR
except ImportError as _error:
    MISSING = f"pyverbs cannot be imported ({_error}); Debian: apt install python3-pyverbs ibverbs-providers"
    PyverbsError = DeviceError
else:
    MISSING = ""
"""Why there are no verbs on this system, empty where there are."""

RETRIES = 6
"""So often is a packet sent again. With 7, rxe of Linux 6.1 never gives up."""
MOST_READS = 16
HOPS = 64
_TAKEN = 32
_channels = threading.Lock()


class _Port(NamedTuple):
    """A port of a device, and which of its addresses is ours."""

    device: str
    number: int
    gid_index: int
    gid: str


class VerbsDevice:
    """Implements `Device`: that port of this machine which has the IP `address`. Raises `DeviceError`.

    A packet is sent again after 4.096 us * 2 ** `ack_timeout`, or later; some adapters take no less than 16 for it.
    """

    ack_timeout = 14

    def __init__(self, address: str) -> None:
        if MISSING:
            raise DeviceError(MISSING)
        with _typed("looking for a device"):
            self._port = _find_port(address)
            self.name = self._port.device
            self._context = Context(name=self.name)
            try:
                facts = self._context.query_port(self._port.number)
                self.mtu, self.most_bytes = int(facts.active_mtu), int(facts.max_msg_sz)
                self.reads = min(MOST_READS, int(self._context.query_device().max_qp_rd_atom))
                self.domain = PD(self._context)
            except BaseException:
                self._context.close()
                raise

    def register(self, memory: memoryview) -> Region:
        """Pin `memory` and let others read it; raises `DeviceError`."""
        return VerbsRegion(self.domain, memory)

    def make_pair(self, reads: int) -> Pair:
        """A queue pair of this port; raises `DeviceError`."""
        return VerbsPair(self, self._context, self._port, reads)

    def close(self) -> None:
        """Close the device; regions and pairs must be closed before."""
        with _typed("closing the device"):
            self.domain.close()
            self._context.close()


class VerbsRegion:
    """Implements `Region`."""

    def __init__(self, domain: Any, memory: memoryview) -> None:
        # Held as long as the region: the memory cannot be unmapped meanwhile.
        self._hold: Any = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address, self.size_bytes = ctypes.addressof(self._hold), len(memory)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ if not MISSING else 0
        with _typed(f"registering {len(memory)} bytes"):
            self._region = MR(domain, self.size_bytes, access, address=self.address)
        self.remote_key, self.local_key = int(self._region.rkey), int(self._region.lkey)

    def close(self) -> None:
        """Unpin it."""
        with _typed("giving memory back"):
            self._region.close()
        self._hold = None


class VerbsPair:
    """Implements `Pair`: a reliable connection with a completion queue and its descriptor of its own."""

    def __init__(self, device: VerbsDevice, context: Any, port: _Port, reads: int) -> None:
        self._port, self._parts, self.descriptor = port, list[Any](), -1
        self._ack_timeout = device.ack_timeout
        try:
            with _typed("making a queue pair"):
                self._make(device, context, reads)
        except BaseException:
            self.close()
            raise
        self.end = QueuePairEnd(
            number=self._pair.qp_num, first_packet=secrets.randbits(24), gid=port.gid, mtu=device.mtu,
            reads=device.reads,
        )  # fmt: skip

    def connect(self, other: QueuePairEnd) -> None:
        """Through all states to the one in which reads can be sent."""
        attributes = self._attributes()
        route = GlobalRoute(dgid=GID(other.gid), sgid_index=self._port.gid_index, hop_limit=HOPS)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=self._port.number)
        attributes.dest_qp_num, attributes.rq_psn = other.number, other.first_packet
        attributes.path_mtu, attributes.sq_psn = min(self.end.mtu, other.mtu), self.end.first_packet
        # What one end sends at a time the other one must be ready to serve.
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = min(self.end.reads, other.reads)
        attributes.timeout, attributes.retry_cnt = self._ack_timeout, RETRIES
        attributes.min_rnr_timer, attributes.rnr_retry = 12, RETRIES
        with _typed("connecting a queue pair"):
            self._pair.to_rts(attributes)

    def read(self, number: int, read: Read, region: Region, key: int) -> None:
        """Post one read, which completes with an event."""
        assert isinstance(region, VerbsRegion)
        place = SGE(read.local, read.size_bytes, region.local_key)
        request = SendWR(
            wr_id=number, opcode=enums.IBV_WR_RDMA_READ, num_sge=1, sg=[place], send_flags=enums.IBV_SEND_SIGNALED
        )
        request.set_wr_rdma(key, read.remote)
        with _typed("posting a read"):
            self._pair.post_send(request)

    def take(self) -> list[Completion]:
        """All completions. The queue is armed again before it is emptied, so that none is overlooked."""
        ended: list[Completion] = []
        if not self._parts:
            return ended
        with _typed("asking for completions"):
            while _next_event(self._channel, self._queue):
                self._queue.ack_events(1)
            self._queue.req_notify()
            while (found := self._queue.poll(_TAKEN))[0]:
                ended += [Completion(int(item.wr_id), _status(int(item.status))) for item in found[1]]
        return ended

    def fail(self) -> None:
        """Into the error state: reads that have not ended are flushed."""
        with _typed("breaking off a queue pair"):
            self._pair.modify(QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy the pair, then what it reports to."""
        parts, self._parts = self._parts, []
        with _typed("destroying a queue pair"):
            for part in reversed(parts):
                part.close()

    def _make(self, device: VerbsDevice, context: Any, reads: int) -> None:
        """Channel, queue and pair; the last one is left ready to be connected."""
        self._channel = None
        if reads:
            self._channel, self.descriptor = _open_channel(context)
            self._parts.append(self._channel)
        self._queue = CQ(context, reads + 2, None, self._channel)
        self._parts.append(self._queue)
        if reads:
            self._queue.req_notify()
        room = QPCap(max_send_wr=max(1, reads), max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        wanted = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room)
        self._pair = QP(device.domain, wanted, self._attributes())
        self._parts.append(self._pair)

    def _attributes(self) -> Any:
        """What holds in every state: the port, and that the other end may read and do nothing else."""
        attributes = QPAttr(port_num=self._port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_READ
        return attributes


@contextmanager
def _typed(what: str) -> Iterator[None]:
    """Let what the library raises be a `DeviceError`."""
    try:
        yield
    except (PyverbsError, OSError) as error:
        raise DeviceError(f"{what}: {' '.join(str(error).split())}") from error


def _find_port(address: str) -> _Port:
    """The port that has `address`, by the table of its GIDs; raises `DeviceError`."""
    try:
        devices = get_device_list()
    except PyverbsError as error:  # as where the kernel knows nothing of verbs
        raise DeviceError("there is no RDMA device") from error
    wanted = _as_gid(address)
    for name in (device.name.decode() for device in devices):
        context = Context(name=name)
        try:
            for port in range(1, context.query_device().phys_port_cnt + 1):
                for index in range(context.query_port(port).gid_tbl_len):
                    if _as_gid(gid := str(context.query_gid(port, index).gid)) == wanted and _is_routed(
                        name, port, index
                    ):
                        return _Port(name, port, index, gid)
        finally:
            context.close()
    names = ", ".join(device.name.decode() for device in devices)
    raise DeviceError(f"no RDMA device has the address {address} ({names})" if names else "there is no RDMA device")


def _as_gid(address: str) -> bytes:
    """An address as the 16 bytes of a GID."""
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else b"\0" * 10 + b"\xff\xff" + parsed.packed


def _is_routed(device: str, port: int, index: int) -> bool:
    """Whether this entry is of RoCE version 2. An adapter lists an address once for each version."""
    try:
        kind = Path(f"/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}").read_text()
    except OSError:
        return True
    return "v2" in kind


def _open_channel(context: Any) -> tuple[Any, int]:
    """A channel of completion events and its descriptor, which does not block.

    Older versions do not tell the descriptor. It is the one of its kind that was not there before.
    """
    with _channels:
        before = _event_descriptors()
        channel = CompChannel(context)
        descriptor = getattr(channel, "fd", None)
        if descriptor is None:
            (descriptor,) = _event_descriptors() - before
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NONBLOCK)
    return channel, int(descriptor)


def _event_descriptors() -> set[int]:
    """Descriptors of this process that belong to channels of events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in os.readlink(entry):
                found.add(int(entry.name))
        except OSError:
            continue  # the one that lists this folder
    return found


def _next_event(channel: Any, queue: Any) -> bool:
    """Whether an event was waiting."""
    try:
        channel.get_cq_event(queue)
    except PyverbsError:
        return False
    return True


def _status(code: int) -> str:
    """The name of a completion's status, without what all have in common; empty for success."""
    if code == enums.IBV_WC_SUCCESS:
        return ""
    names = (name for name in dir(enums) if name.startswith("IBV_WC_") and name.endswith("_ERR"))
    return next((name[len("IBV_WC_") :] for name in names if getattr(enums, name) == code), f"status {code}")

"""Whether there is RDMA, why not, and what becomes of it at the end."""

import logging
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dsuf.errors import CommandError, DeviceError
from dsuf.kv.blocks import map_memory
from dsuf.kv.transport import adapter, verbs
from dsuf.kv.transport.adapter import Adapter, check_memlock, open_adapter
from dsuf.kv.transport.queue_pair import QueuePairEnd, RemoteMemory
from tests.rdma.fake import FakeDevice, Wire

ROOT = Path(__file__).parents[2]


def find(address: str) -> FakeDevice:
    """A device wherever one is looked for."""
    return FakeDevice(Wire(), address)


def find_none(address: str) -> FakeDevice:
    """As on a machine without one."""
    raise DeviceError("there is no RDMA device")


def test_memory_is_registered_whole() -> None:
    opened = open_adapter(map_memory(8192), 256, "127.0.0.1", find=find)
    assert opened is not None
    assert (opened.memory.size_bytes, opened.memory.block_bytes) == (8192, 256)
    opened.close()
    opened.close()


def test_tcp_asks_for_no_device() -> None:
    assert open_adapter(map_memory(8192), 256, "127.0.0.1", wanted="tcp", find=find_none) is None


def test_without_a_device_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dsuf"):
        assert open_adapter(map_memory(8192), 256, "127.0.0.1", find=find_none) is None
    [record] = caplog.records
    assert record.getMessage() == "caches travel over tcp"
    assert record.fields == {"reason": "there is no RDMA device"}  # type: ignore[attr-defined]


def test_rdma_can_be_required() -> None:
    with pytest.raises(CommandError, match=r"^transport = rdma: there is no RDMA device$"):
        open_adapter(map_memory(8192), 256, "127.0.0.1", wanted="rdma", find=find_none)


def test_the_real_library_where_it_is_missing() -> None:
    if not verbs.MISSING:
        pytest.skip("pyverbs is installed here")
    with pytest.raises(CommandError, match="apt install python3-pyverbs"):
        open_adapter(map_memory(8192), 256, "127.0.0.1", wanted="rdma")


def test_a_name_without_an_address() -> None:
    with pytest.raises(CommandError, match="has no address"):
        open_adapter(map_memory(8192), 256, "no such host", wanted="rdma", find=find)


def test_a_node_that_keeps_nothing() -> None:
    with pytest.raises(CommandError, match="no host cache"):
        open_adapter(map_memory(0), 256, "127.0.0.1", wanted="rdma", find=find)


def test_addresses_in_brackets() -> None:
    opened = open_adapter(map_memory(4096), 256, "[::ffff:127.0.0.1]", wanted="rdma", find=lambda _: find("10.0.0.1"))
    assert opened is not None
    opened.close()


def test_locked_memory_is_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is given back; who may lock anything is not held up."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, 8 << 20))
    monkeypatch.setattr(adapter, "_may_lock", lambda: False)
    check_memlock(8 << 20)
    found: list[FakeDevice] = []

    def look(address: str) -> FakeDevice:
        found.append(find(address))
        return found[-1]

    with pytest.raises(CommandError, match=r"16 MiB, but this process may lock 8 MiB \(ulimit -l"):
        open_adapter(map_memory(16 << 20), 256, "127.0.0.1", wanted="rdma", find=look)
    assert not found[0].open
    monkeypatch.setattr(adapter, "_may_lock", lambda: True)
    check_memlock(16 << 20)


def test_registering_that_fails_gives_the_device_back() -> None:
    device = find("10.0.0.1")
    device.register = lambda memory: find_none("")  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(DeviceError):
        Adapter(device, map_memory(4096), 256)
    assert not device.open


def test_a_failure_on_the_way_out_does_not_stop_the_rest() -> None:
    device = find("10.0.0.1")
    made = Adapter(device, map_memory(4096), 256)
    pair = made.make_pair(1)
    close = pair.close

    def fail() -> None:
        close()
        raise DeviceError("busy")

    pair.close = fail  # type: ignore[method-assign]
    made.close()
    assert not device.open
    with pytest.raises(DeviceError, match="closed"):
        made.make_pair(1)


def test_the_interpreters_end_closes_in_order() -> None:
    """The device asserts that everything else came first."""
    code = (
        "from tests.rdma.rig import Nodes\n"
        "nodes = Nodes()\n"
        "pair = nodes.near.adapter.make_pair(4)\n"
        "import atexit\n"
        "device = nodes.near.device\n"
        "close = device.close\n"
        "def told():\n    close()\n    print('closed', len(nodes.near.adapter), pair.state)\n"
        "device.close = told\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("closed")
    assert done.stdout.split()[2] == "closed"


def test_what_nodes_tell_each_other_is_bounded() -> None:
    """Whatever a peer sends, it is a number that a device can take."""
    memory = RemoteMemory(address=(1 << 63) - 1, size_bytes=0, key=(1 << 32) - 1, block_bytes=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=RemoteMemory) == memory
    for change in ({"address": -1}, {"address": 1 << 63}, {"key": 1 << 32}, {"block_bytes": 0}, {"size_bytes": -1}):
        sent = msgspec.msgpack.encode({**msgspec.to_builtins(memory), **change})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(sent, type=RemoteMemory)
    end = QueuePairEnd(number=1, first_packet=(1 << 24) - 1, gid="::1", mtu=5, reads=16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(end), type=QueuePairEnd) == end
    for change in ({"number": 1 << 24}, {"mtu": 0}, {"mtu": 6}, {"reads": 0}, {"gid": "0" * 46}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**msgspec.to_builtins(end), **change}, QueuePairEnd)

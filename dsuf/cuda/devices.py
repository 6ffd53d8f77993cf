"""Several GPUs of one host in one process: each with its own context, and each allowed to read and write the others."""

from collections.abc import Sequence

from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.kernels import Device
from dsuf.errors import CommandError


def count_devices() -> int:
    """How many GPUs the driver lists; raises `DeviceError`."""
    call(driver.cuInit(0))
    return int(call(driver.cuDeviceGetCount()))


def open_devices(count: int) -> list[Device]:
    """The first `count` GPUs, the first of them current; raises `CommandError` where there are not as many that reach
    each other's memory."""
    devices = [Device(index) for index in range(count)]
    for device in devices:
        device.use()
        for other in devices:
            if other.index != device.index:
                _allow(device, other)
    devices[0].use()
    return devices


def _allow(device: Device, other: Device) -> None:
    """Let the current `device` use the memory of `other`."""
    if not call(driver.cuDeviceCanAccessPeer(device.handle, other.handle)):
        raise CommandError(f"the memory of {other.name} {other.index} is out of reach of {device.name} {device.index}")
    (status,) = driver.cuCtxEnablePeerAccess(other.context, 0)
    if status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        call((status,))


def synchronize(devices: Sequence[Device]) -> None:
    """Block until all that was queued on `devices` is done; the first is current then."""
    for device in (*devices[1:], devices[0]):
        device.use()
        call(driver.cuCtxSynchronize())

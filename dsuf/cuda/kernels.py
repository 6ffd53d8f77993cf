"""Load compiled kernels onto the device and launch them: the only place that does.

Through the driver's own interface, as cuda-python offers it; arrays are anything that describes itself as CuPy's do.
"""

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call as _call
from dsuf.cuda.sizes import Sizes
from dsuf.cuda.table import KERNELS, Kernel
from dsuf.cuda.toolchain import TARGETS, Binary
from dsuf.errors import CommandError, DeviceError

STATIC_SHARED_BYTES = 48 * 1024
"""Beyond this much dynamic shared memory a kernel has to ask."""


class Device:
    """GPU number `index` and its primary context, which is made current for this thread."""

    def __init__(self, index: int = 0) -> None:
        if driver is None:
            raise CommandError(
                "no GPU to be used: cuda-python is not installed; a start installs it where nvidia-smi lists one"
            )
        try:
            _call(driver.cuInit(0))
            self.handle = _call(driver.cuDeviceGet(index))
        except (DeviceError, RuntimeError) as error:
            raise CommandError(f"no CUDA device {index}: {error}") from error
        self.index, self.context = index, _call(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.use()
        self.name: str = _call(driver.cuDeviceGetName(128, self.handle)).split(b"\0")[0].decode()
        attribute = driver.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.sm = f"sm_{major}{minor}a"
        if self.sm not in TARGETS:
            raise CommandError(f"{self.name} is {self.sm[:-1]}: kernels exist for {', '.join(TARGETS)}")

    def use(self) -> None:
        """Make this the device of the calling thread."""
        _call(driver.cuCtxSetCurrent(self.context))

    def _attribute(self, which: Any) -> int:
        return int(_call(driver.cuDeviceGetAttribute(which, self.handle)))


class Kernels:
    """Every entry of `binaries` on `device`; raises `CommandError` where one is missing or of another target."""

    def __init__(self, device: Device, binaries: Iterable[Binary], sizes: Sizes) -> None:
        self.names = sizes.named()
        self._overlap = _overlap()
        self._functions: dict[str, Any] = {}
        for binary in binaries:
            if binary.sm != device.sm:
                raise CommandError(f"{binary.source} is built for {binary.sm}, {device.name} is {device.sm}")
            module = _call(driver.cuModuleLoadData(binary.path.read_bytes()))
            for entry in binary.entries:
                self._functions[entry.entry] = _call(driver.cuModuleGetFunction(module, entry.entry.encode()))
        missing = sorted(KERNELS.keys() - self._functions.keys())
        if missing:
            raise CommandError(f"no binary has {', '.join(missing)}")
        for kernel in KERNELS.values():
            self._allow_shared(kernel)

    def launch(self, entry: str, stream: int = 0, **values: DeviceArray | int | float | None) -> None:
        """Queue kernel `entry` with the fields of its struct; raises `CommandError` for wrong ones, else `DeviceError`.

        Nothing is queued for an empty grid.
        """
        kernel = KERNELS[entry]
        names = kernel.names(self.names)
        packed = kernel.params.pack(values, names)
        for name, value in values.items():
            if isinstance(value, int):
                names[name] = value
        columns, rows = kernel.grid(names)
        if not columns or not rows:
            return
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        config = self._geometry(kernel, columns, rows, names, stream)
        _call(driver.cuLaunchKernelEx(config, self._functions[kernel.pick_entry(names)], ctypes.addressof(argument), 0))

    def _geometry(self, kernel: Kernel, columns: int, rows: int, names: Mapping[str, int], stream: int) -> Any:
        """The launch's geometry, and that it may begin before the launch ahead of it on its stream has ended."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = columns, rows, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes, config.hStream = kernel.shared_bytes(names), driver.CUstream(int(stream))
        config.attrs, config.numAttrs = [self._overlap], 1
        return config

    def _allow_shared(self, kernel: Kernel) -> None:
        wanted = kernel.shared_bytes(kernel.names(self.names))
        if wanted > STATIC_SHARED_BYTES // 2:
            which = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(driver.cuFuncSetAttribute(self._functions[kernel.entry], which, wanted))


def _overlap() -> Any:
    """The launch attribute by which kernels of one stream overlap; each waits for its inputs itself (`launch.cuh`)."""
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute

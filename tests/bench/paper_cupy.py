"""A stand-in for CuPy whose arrays are NumPy's and whose kernels do nothing, for benches that a machine without a GPU
runs through once."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class PaperArray(np.ndarray):
    """An array in host memory that describes itself as CuPy's do."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.ctypes.data, False), "version": 3}

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Where it is."""
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def asarray(values: Any, dtype: Any = None) -> Any:
    """`values`, or the memory that they describe."""
    if not isinstance(values, np.ndarray) and hasattr(values, "__cuda_array_interface__"):
        told = values.__cuda_array_interface__
        size = int(np.prod(told["shape"])) * np.dtype(told["typestr"]).itemsize
        memory: Any = (ctypes.c_uint8 * size).from_address(told["data"][0])
        return np.frombuffer(memory, told["typestr"]).reshape(told["shape"]).view(PaperArray)
    return np.asarray(values, dtype).view(PaperArray)


class Current:
    """A device, or a stream: it can be used, entered, and has nothing to wait for."""

    def __init__(self, *told: Any, **more: Any) -> None:
        self.ptr = told[0] if told else 0

    def use(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def __enter__(self) -> "Current":
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing."""


class Module:
    """Kernels by name: a wait of as many cycles as words are looked at, a nanosecond for every cycle of a spin."""

    def __init__(self, code: str) -> None:
        self.code = code

    def get_function(self, name: str) -> Any:
        """What launches kernel `name`."""

        def launch(grid: Any, block: Any, values: Any) -> None:
            if name == "watch":
                values[3].reshape(-1)[0] = 100 * int(values[2])
            else:
                values[1][0] = int(values[0])

        return launch


def _wrap(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **more: asarray(make(*values, **more))


@contextlib.contextmanager
def make_cupy() -> Iterator[ModuleType]:
    """The module."""
    module: Any = ModuleType("cupy")
    module.asarray, module.asnumpy = asarray, np.asarray
    for name in ("zeros", "full", "arange", "where", "isfinite"):
        setattr(module, name, _wrap(getattr(np, name)))
    for name in ("int32", "int64", "uint16", "uint32", "float32"):
        setattr(module, name, getattr(np, name))
    module.ElementwiseKernel = lambda *told, **more: lambda *values: None
    module.RawModule, module.RawKernel = Module, Module
    module.cuda = SimpleNamespace(Device=Current, Stream=Current, ExternalStream=Current, Event=Current)
    yield module

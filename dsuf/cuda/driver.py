"""The CUDA driver's interface as cuda-python offers it, and the one way in which its answers are checked."""

from typing import Any

from dsuf.errors import DeviceError

try:
    from cuda.bindings import driver as _driver
except ImportError:
    _driver = None

api: Any = _driver
"""The driver's functions and constants; None where cuda-python is not installed."""


def call(outcome: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises `DeviceError` with the driver's own name for what went wrong."""
    status, *values = outcome
    if status != api.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver says {status.name}")
    return values[0] if values else None

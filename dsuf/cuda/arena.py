"""All memory of the engine, planned by name and allocated at once.

A `Region` says what an array is and what it is for, without a device; regions add up to a plan that either fits the
stated budget or is refused with its numbers. An `Arena` is the plan carried out: one allocation on the device and one
in pinned host memory, which kernels read in place.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.streams import Usable, handle_on, make_each
from dsuf.errors import CommandError

DTYPES: Mapping[str, Any] = {
    "bf16": np.uint16, "u8": np.uint8, "f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64,
    "u64": np.uint64,
}  # fmt: skip
"""NumPy's type of each kind of element; BF16 values travel as their bits."""

ALIGNMENT_BYTES = 256


class Region(msgspec.Struct, frozen=True):
    """An array to be: its name, kind of element, shape, and the part of the budget that it counts with."""

    name: str
    kind: str
    shape: tuple[int, ...]
    part: str
    pinned: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * int(np.dtype(DTYPES[self.kind]).itemsize)

    @property
    def reserved_bytes(self) -> int:
        """Bytes with what alignment adds."""
        return -(-self.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def add_up(regions: Iterable[Region], *, pinned: bool = False) -> dict[str, int]:
    """Reserved bytes by part, of what is on the device or of what is pinned."""
    parts: Counter[str] = Counter()
    for region in regions:
        if region.pinned == pinned:
            parts[region.part] += region.reserved_bytes
    return dict(parts)


def check_budget(regions: Iterable[Region], budget_bytes: int) -> None:
    """Raise `CommandError`, with the numbers, if what is on the device is more than `budget_bytes`."""
    parts = add_up(regions)
    total = sum(parts.values())
    if total > budget_bytes:
        largest_first = sorted(parts.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{part} {_gigabytes(size)}" for part, size in largest_first)
        raise CommandError(
            f"device memory: {_gigabytes(total)} are needed ({listed}), the budget is {_gigabytes(budget_bytes)}; "
            "serve a shorter context or fewer turns, or keep the Engram tables on the host"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f} GB"


class Array:
    """An array in device or pinned memory, described as CuPy describes its own.

    Where several ranks each have one, this is the first rank's, and `shifts` are the bytes from it to the others'.
    """

    __slots__ = ("kind", "pointer", "shape", "shifts")

    def __init__(self, pointer: int, kind: str, shape: tuple[int, ...], shifts: tuple[int, ...] = ()) -> None:
        self.pointer, self.kind, self.shape, self.shifts = pointer, kind, shape, shifts

    def on(self, rank: int) -> "Array":
        """That rank's own, alone; the same for all ranks where there is only one."""
        shift = self.shifts[rank - 1] if rank and self.shifts else 0
        return Array(self.pointer + shift, self.kind, self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description that launches and other libraries read."""
        dtype = np.dtype(DTYPES[self.kind])
        return {"shape": self.shape, "typestr": dtype.str, "data": (self.pointer, False), "version": 3}

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * int(np.dtype(DTYPES[self.kind]).itemsize)

    def rows(self, start: int, stop: int | None = None) -> "Array":
        """Rows `start` to `stop` along the first axis, all to the end without a `stop`."""
        stop = self.shape[0] if stop is None else stop
        each = self.bytes // max(1, self.shape[0])
        return Array(self.pointer + start * each, self.kind, (stop - start, *self.shape[1:]), self.shifts)

    def __getitem__(self, index: int) -> "Array":
        """Element `index` of the first axis, an array of the other axes."""
        one = self.rows(index, index + 1)
        return Array(one.pointer, one.kind, one.shape[1:], self.shifts)

    def viewed(self, kind: str, *shape: int) -> "Array":
        """The same memory as elements of another kind and shape."""
        return Array(self.pointer, kind, shape, self.shifts)


def write_array(array: Array, values: NDArray[Any], stream: int = 0) -> None:
    """Copy `values` into `array`, every rank's; when this returns, `values` may be changed, and later work on `stream`
    sees them."""
    held = np.ascontiguousarray(values, DTYPES[array.kind])
    if held.nbytes > array.bytes:
        raise ValueError(f"{held.nbytes} bytes do not fit into {array.bytes}")
    for rank, shift in enumerate((0, *array.shifts) if held.nbytes else ()):
        to = handle_on(stream, rank)
        call(driver.cuMemcpyHtoDAsync(array.pointer + shift, held.ctypes.data, held.nbytes, to))


def read_array(array: Array, stream: int = 0) -> NDArray[Any]:
    """A copy of `array` after all work queued on `stream`; blocks."""
    found = np.empty(array.shape, DTYPES[array.kind])
    if found.nbytes:
        call(driver.cuMemcpyDtoHAsync(found.ctypes.data, array.pointer, found.nbytes, stream))
    call(driver.cuStreamSynchronize(stream))
    return found


def fill_bytes(array: Array, value: int, stream: int = 0) -> None:
    """Set every byte of `array`, every rank's."""
    for rank, shift in enumerate((0, *array.shifts) if array.bytes else ()):
        call(driver.cuMemsetD8Async(array.pointer + shift, value, array.bytes, handle_on(stream, rank)))


class Arena:
    """The arrays of some regions, zeroed, once for each of `ranks`; `close` frees them all.

    Ranks have a GPU each where several `devices` are named, and else share the current one.
    """

    def __init__(self, regions: Iterable[Region], ranks: int = 1, devices: Sequence[Usable] = ()) -> None:
        """Allocate; raises `CommandError` where the device or the host has too little left."""
        self.ranks, self._devices = ranks, devices if len(devices) > 1 else ()
        self.regions = {region.name: region for region in regions}
        self._pools: list[tuple[bool, int]] = []
        self._arrays: dict[str, Array] = {}
        for pinned in (False, True):
            self._allocate([region for region in self.regions.values() if region.pinned == pinned], pinned)

    def __getitem__(self, name: str) -> Array:
        """The array of the region called `name`."""
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def host(self, name: str) -> NDArray[Any]:
        """A pinned region as a NumPy array of the same memory."""
        return view_host(self._arrays[name])

    def close(self) -> None:
        """Free everything; idempotent."""
        pools, self._pools, self._arrays = self._pools, [], {}
        for pinned, pool in pools:
            call(driver.cuMemFreeHost(pool) if pinned else driver.cuMemFree(pool))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _allocate(self, regions: list[Region], pinned: bool) -> None:
        total = sum(region.reserved_bytes for region in regions)
        if not total:
            return
        first, *others = self._take_pools(total, pinned)
        shifts = tuple(other - first for other in others)
        for region in regions:
            self._arrays[region.name] = Array(first, region.kind, region.shape, shifts)
            first += region.reserved_bytes

    def _take_pools(self, size: int, pinned: bool) -> list[int]:
        """Where each rank's memory begins."""
        if self._devices and not pinned:
            try:
                return make_each(self._devices, lambda: self._keep(pinned, _take_device(size)))
            except BaseException:
                self.close()
                raise
        take = _take_pinned if pinned else _take_device
        pool = self._keep(pinned, take(size * self.ranks))
        return [pool + size * rank for rank in range(self.ranks)]

    def _keep(self, pinned: bool, pool: int) -> int:
        self._pools.append((pinned, pool))
        return pool


def view_host(array: Array) -> NDArray[Any]:
    """A pinned array as a NumPy array of the same memory."""
    memory: Any = (ctypes.c_uint8 * array.bytes).from_address(array.pointer)
    values: NDArray[Any] = np.frombuffer(memory, DTYPES[array.kind]).reshape(array.shape)
    return values


def free_bytes() -> int:
    """Bytes that are free on the current device."""
    status, free, _ = driver.cuMemGetInfo()
    call((status,))
    return int(free)


def _take_device(size: int) -> int:
    if size > (free := free_bytes()):
        raise CommandError(f"device memory: {_gigabytes(size)} are needed, {_gigabytes(free)} are free")
    pool = int(call(driver.cuMemAlloc(size)))
    call(driver.cuMemsetD8(pool, 0, size))
    return pool


def _take_pinned(size: int) -> int:
    status, pool = driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CommandError(f"pinned host memory: {_gigabytes(size)} are needed, the driver says {status.name}")
    ctypes.memset(int(pool), 0, size)
    return int(pool)

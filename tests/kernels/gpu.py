"""What the kernel tests share: arrays to the device and back, poisoned outputs, how closely results agree."""

import os
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.sizes import from_config
from dsuf.cuda.table import SOURCES
from dsuf.cuda.toolchain import find_toolchain
from dsuf.errors import CommandError
from dsuf.reference.rope import Rope

try:
    import cupy
except ImportError:
    cupy = None

F32 = NDArray[np.float32]
DTYPES = {"bf16": np.uint16, "u8": np.uint8, "f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}


def missing() -> str:
    """Why no kernel can run here, or an empty text."""
    if cupy is None:
        return "no cupy"
    try:
        Device()
        find_toolchain()
    except CommandError as error:
        return str(error)
    return ""


class Gpu:
    """The kernels of one configuration on this machine's GPU."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.sizes = config, from_config(config)
        device = Device()
        binaries = find_toolchain().build_all(SOURCES, os.environ.get("DSUF_SM", device.sm), self.sizes.macros())
        self.kernels = Kernels(device, binaries, self.sizes)

    def run(self, entry: str, out: dict[str, Any], /, **values: Any) -> dict[str, NDArray[Any]]:
        """Launch `entry`; `out` names the arrays that come back: (kind, shape) to be poisoned, or their old contents.

        NumPy arrays among `values` go to the device; `live`, a number, too.
        """
        if "live" in values:
            values["live"] = np.array([values["live"]], np.int32)
        device = {
            name: cupy.asarray(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        for name, shape in out.items():
            device[name] = cupy.asarray(shape) if isinstance(shape, np.ndarray) else poisoned(*shape)
        self.kernels.launch(entry, **device)
        cupy.cuda.Device().synchronize()
        return {name: cupy.asnumpy(device[name]) for name in out}

    def run_in_place(self, entry: str, source: str, target: str, array: NDArray[Any], **values: Any) -> NDArray[Any]:
        """Launch `entry` with one array as both its fields `source` and `target`; returns that array."""
        shared = cupy.asarray(array)
        values |= {source: shared, target: shared}
        self.run(entry, {}, **values)
        back: NDArray[Any] = cupy.asnumpy(shared)
        return back


def poisoned(kind: str, shape: tuple[int, ...]) -> Any:
    """A device array full of NaN, or of a number that nothing means."""
    size = int(np.prod(shape)) * np.dtype(DTYPES[kind]).itemsize
    fill = 0xA5 if kind in ("i32", "i64") else 0xFF
    return cupy.full(size, fill, np.uint8).view(DTYPES[kind]).reshape(shape)


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """BF16 bits of `x`."""
    return np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    """Values of BF16 bits."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def order_fragments(x: NDArray[Any]) -> NDArray[np.uint16]:
    """BF16 bits of `x` [rows, width] in the order in which the experts read them (`fragment.cuh`)."""
    rows, width = x.shape
    octets = to_bf16(x).reshape(rows, width // 8, 8)[:, :, [0, 4, 1, 5, 2, 6, 3, 7]]
    whole = width // 128 * 16
    chunks = octets[:, :whole].reshape(rows, whole // 16, 4, 4, 8).transpose(0, 1, 3, 2, 4)
    return np.concatenate([chunks.reshape(rows, whole, 8), octets[:, whole:]], axis=1).reshape(rows, width)


def arrange_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of two FP4 codes in the order of bits in which the expert kernels read them (`arrange_fp4`)."""
    bits = np.unpackbits(codes.reshape(-1, 2), axis=1, bitorder="little")  # a half word a row, code by code
    places = [6, 7, 8, 15, 3, 4, 5, 12, 0, 1, 2, 13, 9, 10, 11, 14]
    arranged = np.empty_like(bits)
    arranged[:, places] = bits
    return np.packbits(arranged, axis=1, bitorder="little").reshape(codes.shape)


def draw_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray[np.uint16]:
    """Normal BF16 numbers."""
    return to_bf16(rng.standard_normal(shape, np.float32) * np.float32(scale))


def some_positions(rows: int) -> NDArray[np.int64]:
    """Positions from the first to the millionth."""
    return np.resize(np.array([1, 77, 131_072, 0, 999_999], np.int64), rows)


def angles_of(rope: Rope, positions: NDArray[np.int64]) -> F32:
    """The angles of `positions`, as place_angles lists them."""
    turn = rope.rotation(positions)
    return np.stack([turn.cos, turn.sin], axis=-1).astype(np.float32).reshape(len(positions), rope.width)


def draw_e4m3(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    """Every E4M3 code but the NaNs."""
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0x38), codes)


def draw_e8m0(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    """Scales from 2^-12 to 2^3."""
    return rng.integers(115, 131, shape, np.uint8)


def assert_bf16(bits: NDArray[np.uint16], expected: F32, *, steps: float = 1.0, share: float = 0.03) -> None:
    """Within `steps` BF16 steps of `expected`, and equal in all but a `share` of places.

    The step of a value below 2^-8 of its row's largest is that of 2^-8: what is left after cancellation has the
    absolute error of what cancelled.
    """
    actual = from_bf16(bits).astype(np.float64)
    assert actual.shape == expected.shape
    if not actual.size:
        return
    assert np.isfinite(actual).all()
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    magnitude = np.maximum(np.maximum(np.abs(expected), largest * 2.0**-8), 1e-30)
    step = 2.0 ** (np.floor(np.log2(magnitude)) - 7)
    off = np.abs(actual - expected) / step
    assert off.max() <= steps, f"{off.max():.2f} steps at {np.unravel_index(off.argmax(), off.shape)}"
    differ = float(np.mean(actual != expected))
    assert differ <= share, f"{differ:.1%} of places differ"

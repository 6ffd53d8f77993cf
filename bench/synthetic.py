"""Weights and caches of true shapes with random contents, made on the device at the speed of its memory.

Matrices are scaled so that activations stay near 1; never zeros, on which matrix code runs faster than on data.
"""

import math
import zlib
from collections.abc import Iterable
from typing import Any

import cupy

from dsuf.cuda.arena import Arena, Region

E8M0_ONE = 127
# Root mean squares of random codes: E2M1, and E4M3 with the highest exponent bit cleared, as drawn below.
FP4_SIZE, FP8_SIZE = 2.93, 0.64
CLEAR_TOP = 0xBFBFBFBF

_MIX = """
unsigned int x = (unsigned int)i * 0x9E3779B1u ^ seed ^ (unsigned int)(i >> 32);
x ^= x >> 16; x *= 0x85EBCA6Bu; x ^= x >> 13; x *= 0xC2B2AE35u; x ^= x >> 16;
"""
# The sum of four random bytes is close to normal; its mean is 510, its standard deviation 147.8.
_NORMAL = (
    _MIX
    + """
float sum = float(x & 255) + float(x >> 8 & 255) + float(x >> 16 & 255) + float(x >> 24);
float value = mean + (sum - 510.0f) / 147.8f * spread;
"""
)
_words = cupy.ElementwiseKernel("uint32 seed, uint32 mask", "uint32 out", _MIX + "out = x & mask;", "fill_words")
_scales = cupy.ElementwiseKernel(
    "uint32 seed, int32 least", "uint8 out", _MIX + "out = least + (x & 1);", "fill_scales"
)
_bf16 = cupy.ElementwiseKernel(
    "uint32 seed, float32 mean, float32 spread", "uint16 out",
    _NORMAL + "out = (__float_as_uint(value) + 0x8000u) >> 16;", "fill_bf16",
)  # fmt: skip
_f32 = cupy.ElementwiseKernel(
    "uint32 seed, float32 mean, float32 spread", "float32 out", _NORMAL + "out = value;", "fill_f32"
)


def fill_weights(arena: Arena, regions: Iterable[Region]) -> None:
    """Give every region of weights a content, by its name and kind."""
    for region in regions:
        array, seed = cupy.asarray(arena[region.name]), zlib.crc32(region.name.encode())
        if region.kind in ("bf16", "f32"):
            fill = _bf16 if region.kind == "bf16" else _f32
            fill(seed, *_moments(region), array)
        elif region.name.endswith(".scale"):
            _scales(seed, _least_scale(region.name, arena), array)
        else:
            fill_codes(array, seed, fp4=".experts." in region.name)


def fill_codes(array: Any, seed: int, *, fp4: bool) -> None:
    """Random codes without NaN; `array` is bytes, a multiple of four of them."""
    flat = array.reshape(-1).view(cupy.uint32)
    _words(seed, 0xFFFFFFFF if fp4 else CLEAR_TOP, flat)


def fill_rows(array: Any, seed: int, scale_bytes: int, *, e8m0: bool) -> None:
    """Random packed cache rows [..., bytes], whose last `scale_bytes` are scales, E8M0 or E4M3."""
    rows = array.reshape(-1, array.shape[-1])
    fill_codes(rows, seed, fp4=False)
    rows[:, -scale_bytes:] = E8M0_ONE if e8m0 else 0x38  # one, in both


def _moments(region: Region) -> tuple[float, float]:
    """Mean and spread of a tensor of numbers: norms near 1, matrices by their inner width."""
    name = region.name.removesuffix(".weight")
    if name.endswith(("norm", "q_weight", "k_weight")):
        return 1.0, 0.1
    if name.endswith(("bias", "_base", "_scale", "sink")):
        return (0.5, 0.1) if name.endswith("_scale") else (0.0, 0.1)
    if name.endswith("embed"):
        return 0.0, 0.12 if name == "embed" else 1.0
    return 0.0, (3.0 if name.endswith("gate") else 1.0) * region.shape[-1] ** -0.5


def _least_scale(name: str, arena: Arena) -> int:
    """The lower of two neighbouring E8M0 codes whose mean makes a product of the width of this matrix of size 1."""
    weight = f"{name.removesuffix('.scale')}.weight"
    shape, fp4 = arena.regions[weight].shape, ".experts." in name
    if ".engram.embed" in name:
        return E8M0_ONE - 3
    width = shape[-1] * (2 if fp4 else 1)
    return E8M0_ONE - 1 - round(math.log2((FP4_SIZE if fp4 else FP8_SIZE) * width**0.5) - 0.5)

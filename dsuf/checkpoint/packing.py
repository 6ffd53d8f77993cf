"""Real numbers packed as the release packs weights: low-precision codes with a power-of-two scale for each 32."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.inventory import BLOCK

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E8M0_BIAS = 127

Real = NDArray[np.float32]
Packed = tuple[NDArray[Any], NDArray[Any]]
"""Codes, and their scales as E8M0."""


def pack_dense(values: Real) -> Packed:
    """`values` [N, K] as E4M3 [N, K], with scales [N/32, K/32] (rounded up)."""
    return _pack_e4m3(values, BLOCK)


def pack_table(values: Real) -> Packed:
    """`values` [N, K] as E4M3 [N, K], with scales [N, K/32]: each row has its own."""
    return _pack_e4m3(values, 1)


def pack_fp4(values: Real) -> Packed:
    """`values` [N, K] as E2M1 pairs [N, K/2] int8, the even column in the low nibble, with scales [N, K/32]."""
    scaled, exponents = _scale(values, 1, _E2M1_MAX)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return pairs.view(np.int8), _as_e8m0(exponents)


def _pack_e4m3(values: Real, rows: int) -> Packed:
    scaled, exponents = _scale(values, rows, _E4M3_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn), _as_e8m0(exponents)


def _scale(values: Real, rows: int, largest: float) -> tuple[Real, NDArray[np.int32]]:
    """`values` [N, K] divided by 2^e, and the least e for each block of `rows` x 32 that keeps it within `largest`."""
    n, k = values.shape
    padded = np.pad(values, ((0, -n % rows), (0, -k % BLOCK)))
    blocks = padded.reshape(len(padded) // rows, rows, -1, BLOCK)
    peaks = np.maximum(np.abs(blocks).max(axis=(1, 3)), 2.0**-100)
    mantissas, exponents = np.frexp(peaks / np.float32(largest))
    exponents -= mantissas == 0.5  # frexp puts a power of two into the upper binade
    scaled = np.ldexp(blocks, -exponents[:, None, :, None]).reshape(padded.shape)
    return scaled[:n, :k], exponents


def _as_e8m0(exponents: NDArray[np.int32]) -> NDArray[Any]:
    return (exponents + _E8M0_BIAS).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)

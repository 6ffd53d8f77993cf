"""The three arithmetics in which the model can be computed, and the array types that carry it.

Activations are float32 arrays in every mode; in `official` each value that the released code keeps in BF16 is rounded
to BF16 at the same point, so that float32 merely carries it. Products of matrices and means are accumulated in float64
and rounded once: BF16 and FP8 products are exact there, so a row's result does not depend on the other rows.
"""

from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.reference import quant

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

ArithmeticName = Literal["official", "fp32q", "fp32"]


class Arithmetic:
    """Which roundings happen: `rounds` for BF16 activations, `quantises` for FP8 and FP4 activations and caches.

    `official` is the released arithmetic; `fp32q` keeps its quantisers and rounds nothing else below float32; `fp32`
    does neither.
    """

    def __init__(self, name: ArithmeticName) -> None:
        self.name = name
        self.rounds = name == "official"
        self.quantises = name != "fp32"

    def act(self, x: F32) -> F32:
        """`x` as an activation: rounded to BF16 (to nearest, ties to even) in `official`, unchanged elsewhere."""
        return x.astype(ml_dtypes.bfloat16).astype(np.float32) if self.rounds else x

    def q8(self, x: F32) -> F32:
        """`x` as the input of an FP8 or FP4 linear layer: through E4M3 by 32 of the last axis, unless `fp32`."""
        return quant.FP8.roundtrip(x) if self.quantises else x

    def q4_index(self, x: F32) -> F32:
        """`x` as an index query or key: through E2M1 by 32 of the last axis, unless `fp32`."""
        return quant.FP4_INDEX.roundtrip(x) if self.quantises else x


OFFICIAL, FP32Q, FP32 = Arithmetic("official"), Arithmetic("fp32q"), Arithmetic("fp32")


def by_name(name: ArithmeticName) -> Arithmetic:
    """The arithmetic called `name`."""
    return {"official": OFFICIAL, "fp32q": FP32Q, "fp32": FP32}[name]


def matmul(x: F32, weight: F64) -> F32:
    """`x` [rows, k] times the transpose of `weight` [n, k], accumulated in float64, as float32 [rows, n]."""
    product: F64 = np.matmul(x.astype(np.float64), weight.T)
    return product.astype(np.float32)


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x) in float32; below -88, where e^-x leaves float32, the value at -88."""
    gate: F32 = np.float32(1) / (np.float32(1) + np.exp(-np.maximum(x, np.float32(-88))))
    return gate


def silu(x: F32) -> F32:
    """x · sigmoid(x)."""
    return x * sigmoid(x)

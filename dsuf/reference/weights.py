"""From tensors as released to matrices ready for a float64 product.

A linear layer's weight is dequantised once when the model loads: E4M3 and E2M1 values times a power-of-two scale are
exact in BF16, so nothing is lost, and a small model's weights fit in memory as float64.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.reference import quant
from dsuf.reference.arithmetic import F32, F64

TensorByName = Callable[[str], NDArray[np.generic]]


class WeightSource:
    """Tensors of a checkpoint by released name, dequantised; `tensor` returns them as stored (`Checkpoint.tensor`)."""

    def __init__(self, tensor: TensorByName) -> None:
        self.tensor = tensor

    def vector(self, name: str) -> F32:
        """A BF16 or F32 tensor of any shape, as float32."""
        return np.asarray(self.tensor(name)).astype(np.float32)

    def matrix(self, name: str) -> F64:
        """A BF16 or F32 matrix, as float64."""
        return np.asarray(self.tensor(name)).astype(np.float64)

    def linear(self, prefix: str) -> F64:
        """The FP8 weight `prefix`.weight [n, k] times its scales, one a block of 32 x 32."""
        return dequantise_dense(self.tensor(f"{prefix}.weight"), self.tensor(f"{prefix}.scale")).astype(np.float64)

    def expert(self, prefix: str) -> F64:
        """The FP4 weight `prefix`.weight [n, k/2] times its scales, one a row and 32 columns, as [n, k]."""
        return dequantise_expert(self.tensor(f"{prefix}.weight"), self.tensor(f"{prefix}.scale")).astype(np.float64)


def dequantise_dense(weight: NDArray[np.generic], scale: NDArray[np.generic]) -> F32:
    """E4M3 `weight` [n, k] times E8M0 `scale` [ceil(n/32), ceil(k/32)], float32 [n, k]."""
    blocks = np.repeat(np.repeat(quant.decode_e8m0(scale.view(np.uint8)), 32, axis=0), 32, axis=1)
    return quant.decode_e4m3(weight.view(np.uint8)) * blocks[: weight.shape[0], : weight.shape[1]]


def dequantise_expert(weight: NDArray[np.generic], scale: NDArray[np.generic]) -> F32:
    """Packed E2M1 `weight` [n, k/2] times E8M0 `scale` [n, k/32], float32 [n, k]."""
    values = quant.decode_e2m1(weight.view(np.uint8))
    return values * np.repeat(quant.decode_e8m0(scale.view(np.uint8)), 32, axis=1)


def dequantise_rows(rows: NDArray[np.generic], scale: NDArray[np.generic]) -> F32:
    """E4M3 `rows` [n, d] times E8M0 `scale` [n, d/32] (gathered from an Engram table), rounded to BF16, as float32."""
    values = quant.decode_e4m3(rows.view(np.uint8)) * np.repeat(quant.decode_e8m0(scale.view(np.uint8)), 32, axis=-1)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)

"""Root-mean-square norm: x · rsqrt(mean(x²) + eps) · weight, one rounding at the end."""

import numpy as np

from dsuf.reference.arithmetic import F32, F64, Arithmetic


def inverse_rms(x: F32, eps: float) -> F32:
    """rsqrt(mean(x²) + eps) over the last axis [..., 1], the mean in float64."""
    wide = x.astype(np.float64)
    mean: F64 = np.add.reduce(wide * wide, axis=-1, keepdims=True) / x.shape[-1]
    return (1.0 / np.sqrt(mean + eps)).astype(np.float32)


def rms_norm(x: F32, weight: F32, eps: float, arithmetic: Arithmetic) -> F32:
    """The norm of `x` [..., n] with `weight` [n]; an all-zero row stays zero."""
    return arithmetic.act(x * inverse_rms(x, eps) * weight)

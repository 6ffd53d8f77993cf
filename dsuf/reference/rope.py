"""Rotary positions on the last channels of a vector, with the YaRN blend for compressed layers.

Adjacent channels (2i, 2i+1) are one complex number, multiplied by e^(i · position · f_i), f_i = theta^(-2i/width). YaRN
divides the slow frequencies by its factor and blends over a ramp; there is no attention temperature.
"""

import math

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, I64, Arithmetic


class Rope:
    """Frequencies of one rotary table: `compressed` selects the YaRN table of layers that have compressed KV."""

    def __init__(self, config: ModelConfig, *, compressed: bool) -> None:
        self.width = config.rope_head_dim
        theta = config.compress_rope_theta if compressed else config.rope_theta
        exponent = np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        # A power correct to the last bit: an error there would be multiplied by the position.
        plain = np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
        self.frequencies: F32 = _yarn(plain, theta, config) if compressed else plain  # [width / 2], radians a position

    def rotation(self, positions: I64) -> "Rotation":
        """Cosine and sine of every frequency at `positions` [rows]."""
        # The angle is a float32 product, as in the released code: at a million positions its rounding is visible.
        angles = (positions.astype(np.float32)[:, None] * self.frequencies).astype(np.float64)
        return Rotation(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def _yarn(plain: F32, theta: float, config: ModelConfig) -> F32:
    """Frequencies below the ramp divided by the factor, above it kept, between blended."""
    low, high = (_turning_dimension(beta, theta, config) for beta in (config.beta_fast, config.beta_slow))
    first, last = max(math.floor(low), 0), min(math.ceil(high), config.rope_head_dim - 1)
    width = max(last - first, 0.001)
    ramp: F32 = np.clip((np.arange(len(plain), dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
    slowed: F32 = plain / np.float32(config.rope_factor)
    return slowed * ramp + plain * (np.float32(1) - ramp)


def _turning_dimension(turns: float, theta: float, config: ModelConfig) -> float:
    """The (fractional) frequency index that makes `turns` full turns over the original context."""
    wavelength = config.original_seq_len / (turns * 2 * math.pi)
    return config.rope_head_dim * math.log(wavelength) / (2 * math.log(theta))


class Rotation:
    """The rotation of some rows: `cos` and `sin` [rows, width / 2]."""

    def __init__(self, cos: F32, sin: F32) -> None:
        self.cos, self.sin = cos, sin

    def __getitem__(self, rows: slice) -> "Rotation":
        """The rotation of a slice of the rows."""
        return Rotation(self.cos[rows], self.sin[rows])

    def apply(self, x: F32, arithmetic: Arithmetic, *, inverse: bool = False) -> F32:
        """A copy of `x` [rows, channels] or [rows, heads, channels] with its last `width` channels turned (or back)."""
        cos, sin = (self.cos, -self.sin) if inverse else (self.cos, self.sin)
        if x.ndim == 3:
            cos, sin = cos[:, None, :], sin[:, None, :]
        turned = np.array(x)
        tail = turned[..., x.shape[-1] - 2 * self.cos.shape[-1] :]
        real, imaginary = np.array(tail[..., 0::2]), tail[..., 1::2]
        tail[..., 0::2], tail[..., 1::2] = (
            arithmetic.act(real * cos - imaginary * sin),
            arithmetic.act(real * sin + imaginary * cos),
        )
        return turned

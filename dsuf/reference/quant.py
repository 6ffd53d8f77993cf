"""Number formats below BF16, and the three quantisers of the forward pass, exact to the bit.

    E4M3 (fp8)   1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448; no infinity
    E2M1 (fp4)   magnitudes 0 .5 1 1.5 2 3 4 6 are codes 0..7, bit 3 is the sign; two codes a byte, even element low
    E8M0         a scale: byte b means 2^(b-127)

A quantiser divides the last axis into groups, takes a scale from each group's largest magnitude and rounds x / scale to
the element format, to nearest with ties to even. A row packs to all of its codes, then all of its scales.
"""

from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

E4M3_MAX: Final = np.float32(448)
E2M1_MAX: Final = np.float32(6)

_E4M3_VALUES: Final[F32] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES: Final[F32] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_SIGNED: Final = np.concatenate([_E2M1_VALUES, -_E2M1_VALUES])
_E2M1_PAIRS: Final = np.stack([np.tile(_E2M1_SIGNED, 16), np.repeat(_E2M1_SIGNED, 16)], axis=1)  # [byte, low then high]
_E2M1_CODES: Final = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7], np.uint8)  # by twice the (representable) value


def round_e4m3(x: F32) -> F32:
    """`x`, at most 448 in magnitude, to the nearest E4M3 value; the sign of zero is kept."""
    return _round_to_mantissa(x, smallest_normal=2.0**-6, mantissa_bits=3)


def round_e2m1(x: F32) -> F32:
    """`x`, at most 6 in magnitude, to the nearest E2M1 value; the sign of zero is kept."""
    return _round_to_mantissa(x, smallest_normal=1.0, mantissa_bits=1)


def _round_to_mantissa(x: F32, smallest_normal: float, mantissa_bits: int) -> F32:
    """Round by adding and taking away a number so large that float32's own rounding happens at the wanted place."""
    binade = np.maximum(np.abs(x), np.float32(smallest_normal)).view(np.uint32) & np.uint32(0x7F800000)
    anchor = binade.view(np.float32) * np.float32(1.5 * 2.0 ** (23 - mantissa_bits))
    rounded: F32 = np.copysign((x + anchor) - anchor, x)
    return rounded


def ceil_power_of_two(x: F32) -> F32:
    """The smallest power of two at or above each positive normal `x`, by its bits: any mantissa carries over."""
    return ((x.view(np.uint32) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000)).view(np.float32)


def encode_e4m3(x: F32) -> Bytes:
    """Codes of values that E4M3 can represent."""
    codes: Bytes = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def decode_e4m3(codes: Bytes) -> F32:
    """Values of E4M3 codes."""
    return _E4M3_VALUES.take(codes)


def encode_e8m0(x: F32) -> Bytes:
    """Codes of powers of two."""
    return (x.view(np.uint32) >> np.uint32(23)).astype(np.uint8)


def decode_e8m0(codes: Bytes) -> F32:
    """Values of E8M0 codes."""
    return _E8M0_VALUES.take(codes)


def encode_e2m1(x: F32) -> Bytes:
    """Packed codes [..., n/2] of values [..., n] that E2M1 can represent."""
    codes = _E2M1_CODES.take((np.abs(x) * np.float32(2)).astype(np.uint8)) | (np.signbit(x).astype(np.uint8) << 3)
    return np.asarray(codes[..., 0::2] | (codes[..., 1::2] << 4), np.uint8)


def decode_e2m1(packed: Bytes) -> F32:
    """Values [..., n] of packed codes [..., n/2]."""
    return _E2M1_PAIRS.take(packed, axis=0).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


class Quantiser:
    """A quantiser of rows: `pack` to bytes, `unpack` to the values that those bytes mean, `roundtrip` both at once."""

    group: int
    codes_per_byte: int

    def row_bytes(self, width: int) -> int:
        """Bytes of one packed row of `width` elements."""
        return width // self.codes_per_byte + width // self.group

    def roundtrip(self, x: F32) -> F32:
        """`x` as its quantised form means it, float32 of the same shape."""
        elements, scale = self._quantise(x)
        elements *= scale[..., None]
        return elements.reshape(x.shape)

    def pack(self, x: F32) -> Bytes:
        """Rows `x` [rows, width] as bytes [rows, row_bytes(width)]."""
        elements, scale = self._quantise(x)
        return np.concatenate([self._encode(elements.reshape(x.shape)), self._encode_scale(scale)], axis=-1)

    def unpack(self, rows: Bytes) -> F32:
        """Values [rows, width] of packed rows; the inverse of `pack` up to rounding."""
        split = rows.shape[-1] * self.group // (self.group + self.codes_per_byte)
        values = self._decode(rows[..., :split])
        scale = self._decode_scale(rows[..., split:])
        return (values.reshape(*scale.shape, self.group) * scale[..., None]).reshape(values.shape)

    def _quantise(self, x: F32) -> tuple[F32, F32]:
        """Elements in units of their scale [..., groups, group] and scales [..., groups]."""
        grouped = x.reshape(*x.shape[:-1], x.shape[-1] // self.group, self.group)
        scale = self._scale(np.maximum.reduce(np.abs(grouped), axis=-1))
        return self._round(grouped / scale[..., None]), scale

    def _scale(self, largest: F32) -> F32:
        """Scales of groups whose largest magnitude is `largest`."""
        raise NotImplementedError

    def _round(self, x: F32) -> F32:
        return round_e2m1(x)

    def _encode(self, x: F32) -> Bytes:
        return encode_e2m1(x)

    def _decode(self, codes: Bytes) -> F32:
        return decode_e2m1(codes)

    def _encode_scale(self, scale: F32) -> Bytes:
        return encode_e8m0(scale)

    def _decode_scale(self, codes: Bytes) -> F32:
        return decode_e8m0(codes)


class Fp8(Quantiser):
    """E4M3 by 32 with an E8M0 scale: inputs of quantised linear layers, and window rows.

    scale = 2^ceil(log2(max(largest, 1e-4) / 448)), the division by multiplying with float32(1/448). Elements stay
    within 448 up to a rounding error that the format's rounding takes away, so there is nothing to clamp.
    """

    group, codes_per_byte = 32, 1

    def _scale(self, largest: F32) -> F32:
        return ceil_power_of_two(np.maximum(largest, np.float32(1e-4)) * np.float32(1 / 448))

    def _round(self, x: F32) -> F32:
        return round_e4m3(x)

    def _encode(self, x: F32) -> Bytes:
        return encode_e4m3(x)

    def _decode(self, codes: Bytes) -> F32:
        return decode_e4m3(codes)


class Fp4Index(Quantiser):
    """E2M1 by 32 with an E8M0 scale: index queries and index keys.

    scale = 2^ceil(log2(max(largest, 6 · 2^-126) / 6)), the division by multiplying with float32(1/6).
    """

    group, codes_per_byte = 32, 2

    def _scale(self, largest: F32) -> F32:
        return ceil_power_of_two(np.maximum(largest, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))


class Fp4Entry(Quantiser):
    """E2M1 by 16 with an E4M3 scale: compressed KV entries.

    scale = E4M3(max(largest, 6 · 2^-9) / 6), saturating at 448. A rounded scale can be too small, hence the clamp; and
    x / scale must be a true division, since ties move otherwise.
    """

    group, codes_per_byte = 16, 2

    def _scale(self, largest: F32) -> F32:
        return round_e4m3(np.minimum(np.maximum(largest, np.float32(6 * 2.0**-9)) / E2M1_MAX, E4M3_MAX))

    def _round(self, x: F32) -> F32:
        return round_e2m1(np.minimum(np.maximum(x, -E2M1_MAX), E2M1_MAX))

    def _encode_scale(self, scale: F32) -> Bytes:
        return encode_e4m3(scale)

    def _decode_scale(self, codes: Bytes) -> F32:
        return decode_e4m3(codes)


FP8, FP4_INDEX, FP4_ENTRY = Fp8(), Fp4Index(), Fp4Entry()

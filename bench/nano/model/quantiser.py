"""The release's roundings, exact to the bit, with gradients passed straight through them.

Scales come from the bits of the largest magnitude, elements from an addition that rounds at the wanted place; see
`dsuf.reference.quant` for the formulas.
"""

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
GROUP, ENTRY_GROUP = 32, 16
_EXPONENT, _BELOW_EXPONENT = 0x7F800000, 0x007FFFFF


def q8(x: Tensor) -> Tensor:
    """`x` [..., n] through E4M3 by 32 with power-of-two scales: the input of a quantised product, or a window row."""
    return _through(x, _quantise_rows(x, GROUP, 1e-4, E4M3_MAX))


def q4_index(x: Tensor) -> Tensor:
    """`x` [..., n] through E2M1 by 32 with power-of-two scales: an index query or key."""
    return _through(x, _quantise_rows(x, GROUP, 6 * 2.0**-126, E2M1_MAX))


def q4_entry(x: Tensor) -> Tensor:
    """`x` [..., n] through E2M1 by 16 with E4M3 scales: a compressed entry."""
    grouped = _grouped(x, ENTRY_GROUP)
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = _round_e4m3((largest / E2M1_MAX).clamp(max=E4M3_MAX))
    return _through(x, (_round_e2m1((grouped / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).view(x.shape))


def dense_weight(weight: Tensor) -> Tensor:
    """`weight` [..., n, k] as E4M3 with one scale for each 32 x 32 (both sizes multiples of 32)."""
    blocks = weight.detach().view(-1, GROUP, weight.shape[-1] // GROUP, GROUP)
    scale = _scale(blocks.abs().amax((1, 3), keepdim=True), E4M3_MAX)
    return _through(weight, (_round_e4m3(blocks / scale) * scale).view(weight.shape))


def expert_weight(weight: Tensor) -> Tensor:
    """`weight` [..., k] as E2M1 with one scale for each 32 of a row."""
    return _through(weight, _pack_rows(weight, E2M1_MAX))


def table(weight: Tensor) -> Tensor:
    """`weight` [rows, k] as E4M3 with one scale for each 32 of a row."""
    return _through(weight, _pack_rows(weight, E4M3_MAX))


def _through(x: Tensor, value: Tensor) -> Tensor:
    """`value` in the dtype of `x`, with the gradient of `x`; the difference is zero, so no bit changes."""
    return value.to(x.dtype) + (x - x.detach())


def _grouped(x: Tensor, size: int) -> Tensor:
    return x.detach().float().view(*x.shape[:-1], x.shape[-1] // size, size)


def _quantise_rows(x: Tensor, size: int, least: float, largest: float) -> Tensor:
    """An activation's quantiser: the scale's division is a product with the float32 reciprocal."""
    grouped = _grouped(x, size)
    reciprocal = torch.tensor(1 / largest, dtype=torch.float32).item()
    scale = _ceil_power_of_two(grouped.abs().amax(-1, keepdim=True).clamp(min=least) * reciprocal)
    rounded = _round_e4m3(grouped / scale) if largest == E4M3_MAX else _round_e2m1(grouped / scale)
    return (rounded * scale).view(x.shape)


def _pack_rows(weight: Tensor, largest: float) -> Tensor:
    grouped = _grouped(weight, GROUP)
    scale = _scale(grouped.abs().amax(-1, keepdim=True), largest)
    rounded = _round_e4m3(grouped / scale) if largest == E4M3_MAX else _round_e2m1(grouped / scale)
    return (rounded * scale).view(weight.shape)


def _scale(peak: Tensor, largest: float) -> Tensor:
    """The least power of two that keeps a weight's block within `largest`."""
    return _ceil_power_of_two(peak.float().clamp(min=2.0**-100) / largest)


def _ceil_power_of_two(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + _BELOW_EXPONENT) & _EXPONENT).view(torch.float32)


def _round_e4m3(x: Tensor) -> Tensor:
    return _round_to_mantissa(x, 2.0**-6, 3)


def _round_e2m1(x: Tensor) -> Tensor:
    return _round_to_mantissa(x, 1.0, 1)


def _round_to_mantissa(x: Tensor, smallest_normal: float, mantissa_bits: int) -> Tensor:
    binade = (x.abs().clamp(min=smallest_normal).view(torch.int32) & _EXPONENT).view(torch.float32)
    anchor = binade * (1.5 * 2.0 ** (23 - mantissa_bits))
    return (x + anchor) - anchor

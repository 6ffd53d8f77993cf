"""The quantisers against an independent float8 implementation and against each other, on values of every size."""

import ml_dtypes
import numpy as np
import pytest

from dsuf.reference import quant
from dsuf.reference.arithmetic import F32


@pytest.fixture(scope="module")
def values() -> F32:
    """BF16 values over some 60 binades, both signs, zeros and exact ties among them."""
    rng = np.random.default_rng(2)
    wild = rng.standard_normal(1 << 15) * np.exp2(rng.integers(-40, 20, 1 << 15))
    ties = np.arange(-(1 << 14), 1 << 14) / 64
    both = np.concatenate([wild, ties]).astype(ml_dtypes.bfloat16).astype(np.float32)
    rng.shuffle(both)
    return both.reshape(-1, 128)


def test_e4m3_rounding_is_the_formats_own(values: F32) -> None:
    inside = values[np.abs(values) <= 448]
    expected = inside.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(quant.round_e4m3(inside), expected)
    assert np.array_equal(np.signbit(quant.round_e4m3(inside)), np.signbit(expected))


def test_e2m1_rounding_is_the_formats_own(values: F32) -> None:
    inside = values[np.abs(values) <= 6]
    assert np.array_equal(quant.round_e2m1(inside), inside.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_scale_is_the_exact_ceiling_of_the_logarithm(values: F32) -> None:
    x = np.abs(values[values != 0])
    mantissa, exponent = np.frexp(x.astype(np.float64))
    expected = np.exp2(np.where(mantissa == 0.5, exponent - 1, exponent))
    assert np.array_equal(quant.ceil_power_of_two(x), expected.astype(np.float32))


@pytest.mark.parametrize("quantiser", [quant.FP8, quant.FP4_INDEX, quant.FP4_ENTRY], ids=lambda q: type(q).__name__)
def test_packed_rows_mean_the_round_trip(quantiser: quant.Quantiser, values: F32) -> None:
    packed = quantiser.pack(values)
    assert packed.shape == (len(values), quantiser.row_bytes(values.shape[1]))
    assert np.array_equal(quantiser.unpack(packed), quantiser.roundtrip(values))


@pytest.mark.parametrize("quantiser", [quant.FP8, quant.FP4_INDEX, quant.FP4_ENTRY], ids=lambda q: type(q).__name__)
def test_no_row_depends_on_another(quantiser: quant.Quantiser, values: F32) -> None:
    assert np.array_equal(quantiser.pack(values[5:6])[0], quantiser.pack(values)[5])
    assert quantiser.pack(values[:0]).shape == (0, quantiser.row_bytes(values.shape[1]))


def test_entry_bytes_at_the_released_sizes() -> None:
    assert quant.FP4_ENTRY.row_bytes(512) == 288
    assert quant.FP4_INDEX.row_bytes(128) == 68
    assert quant.FP8.row_bytes(512) == 528

"""quantize_rows: the three quantisers, to the bit."""

import numpy as np
import pytest

from dsuf.reference.quant import FP4_ENTRY, FP4_INDEX, FP8, Quantiser
from tests.kernels.gpu import Gpu, cupy, from_bf16, to_bf16

QUANTISERS = {"quantize_fp8": FP8, "quantize_index": FP4_INDEX, "quantize_entry": FP4_ENTRY}


def draw(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """BF16 rows of every size, with ties, zeros of both signs, and groups of zeros."""
    x = rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-30, 20, (rows, 1))
    ties = rng.integers(-24, 25, (rows, width)) / 4.0 * 2.0 ** rng.integers(-3, 4, (rows, 1))
    x = np.where(rng.random((rows, 1)) < 0.4, ties, x)
    x[rng.random((rows, width)) < 0.05] = -0.0
    x.reshape(rows * width // 16, 16)[rng.random(rows * width // 16) < 0.05] = 0
    return to_bf16(x)


@pytest.mark.parametrize("entry", QUANTISERS)
@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 0), (1, 1), (9, 7), (300, 299)])
@pytest.mark.parametrize("width", [32, 96, 512, 5120])
def test_codes(gpu: Gpu, rng: np.random.Generator, entry: str, rows: int, live: int, width: int) -> None:
    """Codes, scales and what they mean; padding is zero."""
    quantiser, x = QUANTISERS[entry], draw(rng, rows, width)
    codes, scales = width // quantiser.codes_per_byte, width // quantiser.group
    out = {"codes": ("u8", (rows, codes)), "scales": ("u8", (rows, scales)), "meaning": ("bf16", (rows, width))}
    found = gpu.run(
        entry, out, x=x, place=None, live=live, codes_stride=codes, scales_stride=scales, rows=rows, width=width
    )
    expected = quantiser.pack(from_bf16(x[:live]))
    np.testing.assert_array_equal(np.concatenate([found["codes"], found["scales"]], axis=1)[:live], expected)
    np.testing.assert_array_equal(found["meaning"][:live], to_bf16(quantiser.roundtrip(from_bf16(x[:live]))))
    assert not any(found[name][live:].any() for name in found)


@pytest.mark.parametrize("entry", QUANTISERS)
@pytest.mark.parametrize("exponent", [-126, -60, -20, 0, 20, 60, 126])
def test_extremes(gpu: Gpu, rng: np.random.Generator, entry: str, exponent: int) -> None:
    """The smallest and the largest BF16 magnitudes."""
    quantiser: Quantiser = QUANTISERS[entry]
    x = to_bf16(np.clip(rng.standard_normal((5, 64)), -1.9, 1.9) * 2.0**exponent)
    codes, scales = 64 // quantiser.codes_per_byte, 64 // quantiser.group
    out = {"codes": ("u8", (5, codes)), "scales": ("u8", (5, scales))}
    found = gpu.run(
        entry, out, x=x, meaning=None, place=None, live=5, codes_stride=codes, scales_stride=scales, rows=5, width=64
    )
    with np.errstate(over="ignore"):
        expected = quantiser.pack(from_bf16(x))
    np.testing.assert_array_equal(np.concatenate([found["codes"], found["scales"]], axis=1), expected)


@pytest.mark.parametrize("entry", QUANTISERS)
def test_packed_rows_in_place(gpu: Gpu, rng: np.random.Generator, entry: str) -> None:
    """Rows go where `place` says, codes and scales in one row; nothing else of the store changes."""
    quantiser, width = QUANTISERS[entry], gpu.config.head_dim
    row_bytes, codes = quantiser.row_bytes(width), width // quantiser.codes_per_byte
    place, x = np.array([5, -1, 0, 9, 3]), draw(rng, 5, width)
    store = rng.integers(0, 256, (12, row_bytes), np.uint8)
    padded = np.concatenate([store.ravel(), np.zeros(16, np.uint8)])
    device = cupy.asarray(padded)
    gpu.kernels.launch(
        entry, x=cupy.asarray(x), codes=device, scales=device[codes:], meaning=None,
        place=cupy.asarray(place), live=cupy.asarray(np.array([4], np.int32)), codes_stride=row_bytes,
        scales_stride=row_bytes, rows=5, width=width,
    )  # fmt: skip
    expected = store.copy()
    expected[[5, 0, 9]] = quantiser.pack(from_bf16(x[[0, 2, 3]]))
    np.testing.assert_array_equal(cupy.asnumpy(device)[: store.size].reshape(store.shape), expected)

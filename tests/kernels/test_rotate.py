"""rotate_rows against the reference's rotation, bit for bit."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.rope import Rope
from tests.kernels.gpu import Gpu, draw_bf16, from_bf16


@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 1), (5, 3)])
@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_rotation(
    gpu: Gpu, rng: np.random.Generator, rows: int, live: int, heads: int, inverse: bool, compressed: bool
) -> None:
    """Positions from the first to the millionth; channels before the tail, and padding, stay as they were."""
    width, rope = gpu.sizes.head_dim, Rope(gpu.config, compressed=compressed)
    x, positions = draw_bf16(rng, rows, heads, width), np.array([0, 1, 999_999, 4095, 77][:rows], np.int64)
    values = {"positions": positions, "frequencies": rope.frequencies, "live": live, "rows": rows, "heads": heads}
    found = gpu.run("rotate_rows", {"x": x}, **values, width=width, inverse=int(inverse))["x"]
    expected = rope.rotation(positions).apply(from_bf16(x), OFFICIAL, inverse=inverse)
    np.testing.assert_array_equal(from_bf16(found[:live]), expected[:live])
    np.testing.assert_array_equal(found[live:], x[live:])

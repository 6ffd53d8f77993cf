"""compress_rows against the reference's pooling, with halves from the launch and from before it."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from tests.kernels.gpu import Gpu, assert_bf16


def pool(first: np.ndarray, second: np.ndarray, first_gate: np.ndarray, second_gate: np.ndarray) -> np.ndarray:
    """Two positions weighted by the softmax of their gates, in the reference's order."""
    gates = np.stack([first_gate, second_gate])
    weight = np.exp(gates - gates.max(axis=0))
    weight = weight / np.add.reduce(weight, axis=0)
    return OFFICIAL.act(np.add.reduce(weight * np.stack([first, second]), axis=0))


@pytest.mark.parametrize("size", [0.0, 1.0, 200.0])
def test_pooling(gpu: Gpu, rng: np.random.Generator, size: float) -> None:
    """Rows that wait, complete a group of the launch, or one from before and give its place away; padding does none."""
    rows, live, dim, slots = 7, 6, gpu.sizes.head_dim, 5
    kv = rng.standard_normal((rows, dim), np.float32)
    gate = rng.standard_normal((rows, dim), np.float32) * np.float32(size)
    halves = rng.standard_normal((slots, 2, dim), np.float32)
    keep, partner = np.array([-2 - 5, 1, -1, -1, 4, -1, 2]), np.array([-2 - 3, -1, 1, -1, -1, 4, 0])
    found = gpu.run(
        "compress_rows", {"pooled": ("bf16", (rows, dim)), "halves": halves}, kv=kv, gate=gate, keep=keep,
        partner=partner, live=live, rows=rows,
    )  # fmt: skip
    expected = np.zeros((live, dim), np.float32)
    expected[0] = pool(halves[3, 0], kv[0], halves[3, 1], gate[0])
    expected[2], expected[5] = pool(kv[1], kv[2], gate[1], gate[2]), pool(kv[4], kv[5], gate[4], gate[5])
    assert_bf16(found["pooled"][:live], expected)
    assert not found["pooled"][live:].any()
    kept = halves.copy()
    kept[3] = np.stack([kv[5], gate[5]])
    kept[1], kept[4] = np.stack([kv[1], gate[1]]), np.stack([kv[4], gate[4]])
    np.testing.assert_array_equal(found["halves"], kept)

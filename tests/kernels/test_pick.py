"""pick_tokens: the arg-max, the lowest id among equals."""

import numpy as np
import pytest

from tests.kernels.gpu import Gpu


@pytest.mark.parametrize("vocabulary", [1, 31, 1024, 1025, 8192, 129_280])
@pytest.mark.parametrize("kinds", [1, 3, 1 << 20])
def test_pick(gpu: Gpu, rng: np.random.Generator, vocabulary: int, kinds: int) -> None:
    """Many equals, few equals, all negative, all minus infinity."""
    logits = rng.integers(-kinds, kinds, (6, vocabulary)).astype(np.float32)
    logits[1] -= kinds * 2
    logits[2] = -np.inf
    out = {"picked": ("i32", (6,)), "best": ("f32", (6,))}
    found = gpu.run("pick_tokens", out, logits=logits, live=5, rows=6, vocabulary=vocabulary)
    expected = logits.argmax(axis=1)
    expected[2] = 0
    np.testing.assert_array_equal(found["picked"], [*expected[:5], -1])
    np.testing.assert_array_equal(found["best"][:5], logits.max(axis=1)[:5])

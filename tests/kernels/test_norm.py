"""norm_quantize and collapse_norm against the reference's norm and FP8 quantiser."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.hyper import collapse
from dsuf.reference.norm import rms_norm
from dsuf.reference.quant import FP8
from tests.kernels.gpu import Gpu, assert_bf16, draw_bf16, from_bf16, order_fragments, to_bf16

ROWS = [(0, 0), (1, 1), (3, 0), (9, 7)]


def outputs(rows: int, width: int) -> dict[str, object]:
    """What both kernels write."""
    return {"y": ("bf16", (rows, width)), "codes": ("u8", (rows, width)), "scales": ("u8", (rows, width // 32))}


def assert_quantised(found: dict[str, np.ndarray], live: int) -> None:
    """The codes are those of the kernel's own norm, to the bit; padding is zero."""
    packed = np.concatenate([found["codes"], found["scales"]], axis=1)
    np.testing.assert_array_equal(packed[:live], FP8.pack(from_bf16(found["y"][:live])))
    assert not packed[live:].any()
    assert not found["y"][live:].any()


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_norm(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """Rows of very different size, one of zeros."""
    width = gpu.sizes.dim
    x = to_bf16(rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-40, 40, (rows, 1)))
    x[:1] = 0
    weight = draw_bf16(rng, width)
    found = gpu.run("norm_dim", outputs(rows, width), x=x, weight=weight, live=live, rows=rows)
    expected = rms_norm(from_bf16(x), from_bf16(weight), gpu.config.norm_eps, OFFICIAL)
    assert_bf16(found["y"][:live], expected[:live], share=0.002)
    assert_quantised(found, live)
    for row in range(live):
        alone = gpu.run(
            "norm_dim", {"y": ("bf16", (1, width))}, x=x[row : row + 1], weight=weight, codes=None, scales=None,
            live=1, rows=1,
        )  # fmt: skip
        np.testing.assert_array_equal(alone["y"][0], found["y"][row])


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_collapse(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """Collapse, norm and quantiser in one."""
    s, dim = gpu.sizes.streams, gpu.sizes.dim
    streams, weight = draw_bf16(rng, rows, s, dim, scale=30), draw_bf16(rng, dim)
    pre = rng.random((rows, s), np.float32)
    out = outputs(rows, dim) | {"meaning": ("bf16", (rows, dim))}
    found = gpu.run("collapse_norm", out, streams=streams, pre=pre, weight=weight, live=live, rows=rows)
    collapsed = collapse(from_bf16(streams), pre, OFFICIAL)
    expected = rms_norm(collapsed, from_bf16(weight), gpu.config.norm_eps, OFFICIAL)
    assert_bf16(found["y"][:live], expected[:live], share=0.002)
    assert_quantised(found, live)
    packed = np.concatenate([found["codes"], found["scales"]], axis=1)[:live]
    np.testing.assert_array_equal(found["meaning"][:live], order_fragments(FP8.unpack(packed)))

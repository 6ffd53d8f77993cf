"""project_streams, mix_streams, expand_streams and expand_collapse: the hyper-connections of a site."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL, matmul
from dsuf.reference.hyper import Mixes, expand, split_mixes
from dsuf.reference.norm import inverse_rms
from tests.kernels.gpu import Gpu, assert_bf16, draw_bf16, from_bf16

ROWS = [(0, 0), (1, 1), (4, 0), (8, 8), (9, 6), (17, 17)]


def mix(gpu: Gpu, streams: np.ndarray, fn: np.ndarray, base: np.ndarray, scale: np.ndarray, live: int) -> Mixes:
    """Both kernels of a site."""
    rows, s, names = len(streams), gpu.sizes.streams, gpu.sizes.named()
    shape = (rows, names["splits"], names["outputs"] + 1)
    partial = gpu.run("project_streams", {"partial": ("f32", shape)}, streams=streams, fn=fn, live=live, rows=rows)
    out = {"pre": ("f32", (rows, s)), "post": ("f32", (rows, s)), "comb": ("f32", (rows, s, s))}
    return Mixes(**gpu.run("mix_streams", out, **partial, base=base, scale=scale, live=live, rows=rows))


@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_mixes(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, size: float) -> None:
    """Mixes of a random site, within float32; each row as it is alone; padding zero."""
    s, dim, outputs = gpu.sizes.streams, gpu.sizes.dim, gpu.sizes.named()["outputs"]
    streams = draw_bf16(rng, rows, s, dim, scale=size)
    fn = rng.standard_normal((outputs, s * dim), np.float32) * np.float32((s * dim) ** -0.5)
    base, scale = rng.standard_normal(outputs, np.float32), rng.standard_normal(3, np.float32)
    found = mix(gpu, streams, fn, base, scale, live)
    flat = from_bf16(streams).reshape(rows, s * dim)
    projected = matmul(flat, fn.astype(np.float64)) * inverse_rms(flat, gpu.config.norm_eps)
    expected = split_mixes(projected, scale, base, gpu.config)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[:live], theirs[:live], rtol=2e-5, atol=2e-6)
        assert not ours[live:].any()
    for row in range(live):
        for ours, alone in zip(found, mix(gpu, streams[row : row + 1], fn, base, scale, 1), strict=True):
            np.testing.assert_array_equal(ours[row], alone[0])


@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("in_place", [False, True])
def test_expand(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, in_place: bool) -> None:
    """The reference's bits, but where four products in float32 round another way than in float64."""
    s, dim = gpu.sizes.streams, gpu.sizes.dim
    branch, streams = draw_bf16(rng, rows, dim, scale=3), draw_bf16(rng, rows, s, dim, scale=30)
    mixes = Mixes(*(rng.random(shape, np.float32) for shape in [(rows, s), (rows, s), (rows, s, s)]))
    values = {"branch": branch, "post": mixes.post, "comb": mixes.comb, "live": live, "rows": rows}
    if in_place:
        device = gpu.run_in_place("expand_streams", "streams", "out", streams, **values)
    else:
        device = gpu.run("expand_streams", {"out": ("bf16", (rows, s, dim))}, streams=streams, **values)["out"]
    expected = expand(from_bf16(branch), from_bf16(streams), mixes, OFFICIAL)
    assert_bf16(device[:live], expected[:live], share=0.0005)
    assert not device[live:].any()


@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_expand_and_collapse(
    gpu: Gpu, rng: np.random.Generator, rows: int, live: int, in_place: bool, quantised: bool
) -> None:
    """The bits of the two kernels one after the other."""
    s, dim = gpu.sizes.streams, gpu.sizes.dim
    branch, streams = draw_bf16(rng, rows, dim, scale=3), draw_bf16(rng, rows, s, dim, scale=30)
    values = {"live": live, "rows": rows, "post": rng.random((rows, s), np.float32), "branch": branch}
    values |= {"comb": rng.random((rows, s, s), np.float32)}
    collapsing = {"pre": rng.random((rows, s), np.float32), "weight": draw_bf16(rng, dim)}
    out = {"y": ("bf16", (rows, dim)), "codes": ("u8", (rows, dim)), "scales": ("u8", (rows, dim // 32))}
    out |= {"meaning": ("bf16", (rows, dim))}
    absent = dict.fromkeys(("codes", "scales", "meaning"))
    if not quantised:
        out, collapsing = {"y": out["y"]}, collapsing | absent
    shape = ("bf16", (rows, s, dim))
    expanded = gpu.run("expand_streams", {"out": shape}, streams=streams, **values)["out"]
    input_ = gpu.run("collapse_norm", out, streams=expanded, **collapsing, live=live, rows=rows)
    if in_place:
        np.testing.assert_array_equal(
            gpu.run_in_place("expand_collapse", "streams", "out", streams, **values, **collapsing,
                             **({} if not quantised else absent), y=np.zeros_like(branch)),
            expanded,
        )  # fmt: skip
        return
    found = gpu.run("expand_collapse", out | {"out": shape}, streams=streams, **values, **collapsing)
    np.testing.assert_array_equal(found["out"], expanded)
    for name in out:
        np.testing.assert_array_equal(found[name], input_[name])

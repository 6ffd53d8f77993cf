"""Routing, grouping, and the routed and shared experts."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL, matmul
from dsuf.reference.moe import Router, swiglu
from dsuf.reference.quant import FP8
from dsuf.reference.weights import dequantise_expert
from tests.kernels.gpu import Gpu, assert_bf16, draw_bf16, draw_e8m0, from_bf16, order_fragments

ROWS = [(0, 0), (1, 1), (3, 0), (9, 6), (40, 33)]


@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize(("experts", "picks"), [(384, 6), (128, 3), (16, 6), (8, 2)])
@pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
def test_route(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, experts: int, picks: int, size: float) -> None:
    """Choices and weights; with equal scores the lowest ids win."""
    logits = rng.standard_normal((rows, experts), np.float32) * np.float32(size)
    bias = rng.standard_normal(experts).astype(np.float32) * np.float32(size > 0)
    out = {"chosen": ("i32", (rows, picks)), "weights": ("f32", (rows, picks))}
    sizes = {"rows": rows, "experts": experts, "picks": picks}
    aside = dict.fromkeys(("used", "expert", "first", "order", "arrived"))
    found = gpu.run("route_experts", out, logits=logits, bias=bias, live=live, **sizes, **aside)
    router = Router(np.eye(experts), bias, picks, gpu.config.route_scale)
    scores = router.scores(logits)
    chosen = router.choose(scores)
    np.testing.assert_array_equal(found["chosen"][:live], chosen[:live])
    np.testing.assert_allclose(found["weights"][:live], router.weights(scores, chosen)[:live], rtol=2e-6)
    assert (found["chosen"][live:] == -1).all()
    assert not found["weights"][live:].any()
    lists = {name: ("i32", shape) for name, shape in group_shapes(rows, picks, experts).items()}
    arrived = {"arrived": np.zeros(1, np.int32)}
    both = gpu.run("route_experts", out | lists | arrived, logits=logits, bias=bias, live=live, **sizes)
    assert not both["arrived"].any()
    if rows:
        for name, expected in (found | group(gpu, found["chosen"], experts)).items():
            np.testing.assert_array_equal(both[name], expected)


def group_shapes(rows: int, picks: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Of the lists of pairs by expert."""
    return {"used": (1,), "expert": (experts,), "first": (experts + 1,), "order": (rows, picks)}


def group(gpu: Gpu, chosen: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    """What group_experts makes of `chosen`."""
    rows, picks = chosen.shape
    out = {name: ("i32", shape) for name, shape in group_shapes(rows, picks, experts).items()}
    return gpu.run("group_experts", out, chosen=chosen, rows=rows, picks=picks, experts=experts)


@pytest.mark.parametrize("experts", [1, 8, 384, 1024])
@pytest.mark.parametrize("rows", [1, 7, 96, 170, 171, 400])
def test_group(gpu: Gpu, rng: np.random.Generator, experts: int, rows: int) -> None:
    """Pairs by expert, then by number; negative ones left out."""
    chosen = rng.integers(-1, experts, (rows, 6)).astype(np.int32)
    found, flat = group(gpu, chosen, experts), chosen.ravel()
    used, load = np.unique(flat[flat >= 0], return_counts=True)
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
    assert found["used"][0] == len(used)
    np.testing.assert_array_equal(found["expert"], np.pad(used, (0, experts - len(used)), constant_values=-1))
    bounds = np.concatenate([[0], np.cumsum(load)])
    np.testing.assert_array_equal(found["first"], np.pad(bounds, (0, experts - len(used)), mode="edge"))
    np.testing.assert_array_equal(
        found["order"].ravel(), np.pad(order, (0, len(flat) - len(order)), constant_values=-1)
    )


def draw_expert(rng: np.random.Generator, experts: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """FP4 weights with their scales."""
    return rng.integers(0, 256, (experts, n, k // 2), np.uint8), draw_e8m0(rng, experts, n, k // 32)


@pytest.mark.parametrize(("rows", "live"), [(1, 1), (3, 0), (14, 11), (50, 47)])
def test_routed(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """Both halves, each with the kernel's own input; experts with up to eight pairs, and with many more."""
    experts, picks, dim, inter = 5, 3, gpu.sizes.dim, gpu.sizes.inter
    chosen = np.sort(np.argsort(rng.random((rows, experts)), axis=1)[:, :picks], axis=1).astype(np.int32)
    chosen[live:] = -1
    packed = FP8.pack(from_bf16(draw_bf16(rng, rows, dim)))
    (w1, s1), (w3, s3), (w2, s2) = (draw_expert(rng, experts, *shape) for shape in [(inter, dim)] * 2 + [(dim, inter)])
    weights, grouped = rng.random((rows, picks), np.float32), group(gpu, chosen, experts)
    pairs = rows * picks

    def up(**change: object) -> np.ndarray:
        values = {"x": order_fragments(FP8.unpack(packed)), "weights": weights, **grouped} | change
        stored = {"w1": w1, "w1_scale": s1, "w3": w3, "w3_scale": s3, "slots": experts, "picks": picks}
        return gpu.run("experts_up", {"inner": ("bf16", (pairs, inter))}, **stored, **values)["inner"]

    inner, x, act = up(), FP8.unpack(packed), OFFICIAL.act
    routed = np.flatnonzero(chosen.ravel() >= 0)
    for pair in routed:
        row, expert = pair // picks, chosen.ravel()[pair]
        hidden = [matmul(x[row : row + 1], dequantise_expert(w[expert], s[expert]).astype(np.float64))
                  for w, s in ((w1, s1), (w3, s3))]  # fmt: skip
        gated = swiglu(act(np.concatenate(hidden, axis=1)), np.float32(gpu.config.swiglu_limit))
        assert_bf16(inner[pair : pair + 1], act(gated * weights.ravel()[pair]), steps=4)
    assert (np.delete(inner, routed, axis=0) == 0xFFFF).all()

    inner[np.setdiff1d(np.arange(pairs), routed)] = 0
    packed_inner = FP8.pack(from_bf16(inner))
    out = gpu.run(
        "experts_down", {"out": ("bf16", (pairs, dim))}, inner=inner, w2=w2, w2_scale=s2, **grouped, slots=experts
    )["out"]
    for pair in routed:
        wide = dequantise_expert(w2[chosen.ravel()[pair]], s2[chosen.ravel()[pair]]).astype(np.float64)
        assert_bf16(out[pair : pair + 1], act(matmul(FP8.unpack(packed_inner[pair : pair + 1]), wide)))
    assert (np.delete(out, routed, axis=0) == 0xFFFF).all()
    if live:
        alone = group(gpu, chosen[:1], experts)
        one = up(x=order_fragments(FP8.unpack(packed[:1])), weights=weights[:1], **alone)
        np.testing.assert_array_equal(one[:picks], up()[:picks])


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_shared_and_sum(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """The shared expert's gate, and the sum of a row's experts in order; what padding holds is not looked at."""
    inter, dim, picks = gpu.sizes.inter, gpu.sizes.dim, gpu.config.n_activated_experts
    hidden = draw_bf16(rng, rows, 2 * inter, scale=8)
    inner = gpu.run("swiglu_rows", {"inner": ("bf16", (rows, inter))}, hidden=hidden, live=live, rows=rows)["inner"]
    expected = OFFICIAL.act(swiglu(from_bf16(hidden), np.float32(gpu.config.swiglu_limit)))
    assert_bf16(inner[:live], expected[:live])
    assert not inner[live:].any()
    routed, shared = draw_bf16(rng, rows, picks, dim), draw_bf16(rng, rows, dim)
    routed[live:], shared[live:] = 0xFFFF, 0xFFFF
    out = {"out": ("bf16", (rows, dim))}
    summed = gpu.run("combine_experts", out, routed=routed, shared=shared, live=live, rows=rows, picks=picks)["out"]
    total = np.add.reduce(from_bf16(routed[:live]), axis=1) + from_bf16(shared[:live])
    np.testing.assert_array_equal(from_bf16(summed[:live]), OFFICIAL.act(total))
    assert not summed[live:].any()

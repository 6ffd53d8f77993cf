"""Routing, grouping, and the routed and shared experts."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL, matmul
from dsuf.reference.moe import Router, swiglu
from dsuf.reference.quant import FP8
from dsuf.reference.weights import dequantise_dense, dequantise_expert
from tests.kernels.gpu import (
    Gpu,
    arrange_codes,
    assert_bf16,
    draw_bf16,
    draw_e4m3,
    draw_e8m0,
    from_bf16,
    order_fragments,
)

Found = dict[str, np.ndarray]
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


@pytest.mark.parametrize(("rows", "live"), [(1, 1), (6, 6), (8, 5), (3, 0)])
@pytest.mark.parametrize(("experts", "picks"), [(384, 6), (128, 3), (512, 8), (24, 6)])
def test_route_few(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, experts: int, picks: int) -> None:
    """To the bit what router, routing and grouping give one after the other; with equal scores the lowest ids win."""
    sizes = {"rows": rows, "experts": experts, "live": live}
    values = {"x": draw_bf16(rng, rows, gpu.sizes.dim), "weight": draw_bf16(rng, experts, gpu.sizes.dim, scale=0.05)}
    bias = rng.standard_normal(experts).astype(np.float32)
    values["weight"][: experts // 2], bias[: experts // 2] = values["weight"][:1], 0.0
    logits = {"out": ("f32", (rows, experts))}
    router = gpu.run("project_bf16_few", logits, **values, rounded=None, rows=rows, live=live, n=experts)["out"]
    chosen = {"chosen": ("i32", (rows, picks)), "weights": ("f32", (rows, picks))}
    lists = {name: ("i32", shape) for name, shape in group_shapes(rows, picks, experts).items()}
    out = chosen | lists | {"arrived": np.zeros(1, np.int32)}
    expected = gpu.run("route_experts", out, logits=router, bias=bias, picks=picks, **sizes)
    rated = dict.fromkeys(("scores", "biased"), ("f32", (rows, experts)))
    scored = gpu.run("score_input", rated, **values, bias=bias, **sizes)
    found = gpu.run("choose_few", chosen | lists, **scored, picks=picks, **sizes)
    for name in chosen | lists:
        np.testing.assert_array_equal(found[name], expected[name])


def draw_shared(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """FP8 weights with their scales, of a size that keeps results in range."""
    return draw_e4m3(rng, n, k), draw_e8m0(rng, n // 32, k // 32) - np.uint8(6)


def draw_expert(rng: np.random.Generator, experts: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """FP4 weights with their scales."""
    return rng.integers(0, 256, (experts, n, k // 2), np.uint8), draw_e8m0(rng, experts, n, k // 32)


@pytest.mark.parametrize("count", [1, 255, 257])
def test_arrange(gpu: Gpu, count: int) -> None:
    """Every place of every code in its word."""
    codes = np.arange(16 * count, dtype=np.uint32).astype(np.uint8).reshape(count, 16)
    codes[:, 1::2] = codes[:, ::2] * np.uint8(5) + np.uint8(3)
    np.testing.assert_array_equal(
        gpu.run("arrange_codes", {"codes": codes}, count=count)["codes"], arrange_codes(codes)
    )


class Layer:
    """Random weights of five routed experts and a shared one."""

    experts, picks = 5, 3

    def __init__(self, gpu: Gpu, rng: np.random.Generator) -> None:
        dim, inter = self.dim, self.inter = gpu.sizes.dim, gpu.sizes.inter
        self.gpu, self.limit = gpu, np.float32(gpu.config.swiglu_limit)
        self.routed = [draw_expert(rng, self.experts, *shape) for shape in ((inter, dim), (inter, dim), (dim, inter))]
        self.shared = [draw_shared(rng, 2 * inter, dim), draw_shared(rng, dim, inter)]

    def up(self, packed: np.ndarray, live: int, weights: np.ndarray, grouped: dict[str, np.ndarray]) -> Found:
        """What experts_up makes of packed rows."""
        rows, ((w1, s1), (w3, s3), _) = len(packed), self.routed
        out = {"inner": ("bf16", (rows * self.picks, self.inter)), "shared_inner": ("bf16", (rows, self.inter))}
        return self.gpu.run(
            "experts_up", out, x=order_fragments(FP8.unpack(packed)), w1=arrange_codes(w1), w1_scale=s1,
            w3=arrange_codes(w3), w3_scale=s3, shared=self.shared[0][0], shared_scale=self.shared[0][1],
            weights=weights, **grouped, live=live, rows=rows, slots=self.experts, picks=self.picks,
        )  # fmt: skip

    def down(self, found: Found, live: int, grouped: dict[str, np.ndarray]) -> Found:
        """What experts_down makes of that."""
        rows = len(found["shared_inner"])
        out = {"out": ("bf16", (rows * self.picks, self.dim)), "shared_out": ("bf16", (rows, self.dim))}
        w2, scale = self.routed[2]
        return self.gpu.run(
            "experts_down", out, **found, w2=arrange_codes(w2), w2_scale=scale, shared=self.shared[1][0],
            shared_scale=self.shared[1][1], **grouped, live=live, rows=rows, slots=self.experts,
        )  # fmt: skip

    def assert_gated(self, bits: np.ndarray, x: np.ndarray, w13: np.ndarray, weight: float = 1.0) -> None:
        """Each inner value is that of halves which are within one BF16 step of the reference's; nearly all are its own.

        The gate magnifies a step of its half, the more the further below zero it is.
        """
        halves = np.split(OFFICIAL.act(matmul(x, w13)), 2, axis=1)
        steps = [np.maximum(np.abs(h), np.abs(h).max(axis=1, keepdims=True) * 2.0**-8) * 2.0**-7 for h in halves]
        moved = [[h + i * step for i in (-1, 0, 1)] for h, step in zip(halves, steps, strict=True)]
        values = [swiglu(np.concatenate([a, b], axis=1).astype(np.float32), self.limit) * np.float32(weight)
                  for a in moved[0] for b in moved[1]]  # fmt: skip
        actual, expected = from_bf16(bits), OFFICIAL.act(values[4])
        rounding = np.maximum(np.abs(expected), np.abs(expected).max(axis=1, keepdims=True) * 2.0**-8) * 2.0**-7
        assert (actual >= np.min(values, axis=0) - rounding).all()
        assert (actual <= np.max(values, axis=0) + rounding).all()
        assert np.mean(actual != expected) <= 0.03

    def wide(self, matrix: int, expert: int) -> np.ndarray:
        """A routed expert's matrix."""
        weight, scale = self.routed[matrix]
        return dequantise_expert(weight[expert], scale[expert]).astype(np.float64)


@pytest.mark.parametrize(("rows", "live"), [(1, 1), (3, 0), (14, 11), (50, 47)])
def test_experts(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """Both halves, each with the kernel's own input; experts with up to eight pairs, and with many more."""
    layer = Layer(gpu, rng)
    chosen = np.sort(np.argsort(rng.random((rows, layer.experts)), axis=1)[:, : layer.picks], axis=1).astype(np.int32)
    chosen[live:] = -1
    packed = FP8.pack(from_bf16(draw_bf16(rng, rows, layer.dim)))
    weights, grouped, x = rng.random((rows, layer.picks), np.float32), group(gpu, chosen, 5), FP8.unpack(packed)
    found, act, flat = layer.up(packed, live, weights, grouped), OFFICIAL.act, chosen.ravel()
    routed = np.flatnonzero(flat >= 0)
    for pair in routed:
        row, w13 = pair // layer.picks, np.concatenate([layer.wide(0, flat[pair]), layer.wide(1, flat[pair])])
        layer.assert_gated(found["inner"][pair : pair + 1], x[row : row + 1], w13, weights.ravel()[pair])
    shared = [dequantise_dense(*tensors).astype(np.float64) for tensors in layer.shared]
    if live:
        layer.assert_gated(found["shared_inner"][:live], x[:live], shared[0])
    assert (np.delete(found["inner"], routed, axis=0) == 0xFFFF).all()
    assert (found["shared_inner"][live:] == 0xFFFF).all()

    out = layer.down(found, live, grouped)
    for pair in routed:
        rounded = FP8.unpack(FP8.pack(from_bf16(found["inner"][pair : pair + 1])))
        assert_bf16(out["out"][pair : pair + 1], act(matmul(rounded, layer.wide(2, flat[pair]))))
    rounded = FP8.unpack(FP8.pack(from_bf16(found["shared_inner"][:live])))
    assert_bf16(out["shared_out"][:live], act(matmul(rounded, shared[1])))
    assert (np.delete(out["out"], routed, axis=0) == 0xFFFF).all()
    assert (out["shared_out"][live:] == 0xFFFF).all()
    if live:
        grouped = group(gpu, chosen[:1], 5)
        alone = layer.up(packed[:1], 1, weights[:1], grouped)
        for name, count in (("inner", layer.picks), ("shared_inner", 1)):
            np.testing.assert_array_equal(alone[name], found[name][:count])
        alone = layer.down(alone, 1, grouped)
        np.testing.assert_array_equal(alone["out"], out["out"][: layer.picks])
        np.testing.assert_array_equal(alone["shared_out"], out["shared_out"][:1])


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_sum(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """A row's experts in order; what padding holds is not looked at."""
    dim, picks = gpu.sizes.dim, gpu.config.n_activated_experts
    routed, shared = draw_bf16(rng, rows, picks, dim), draw_bf16(rng, rows, dim)
    routed[live:], shared[live:] = 0xFFFF, 0xFFFF
    out = {"out": ("bf16", (rows, dim))}
    summed = gpu.run("combine_experts", out, routed=routed, shared=shared, live=live, rows=rows, picks=picks)["out"]
    total = np.add.reduce(from_bf16(routed[:live]), axis=1) + from_bf16(shared[:live])
    np.testing.assert_array_equal(from_bf16(summed[:live]), OFFICIAL.act(total))
    assert not summed[live:].any()

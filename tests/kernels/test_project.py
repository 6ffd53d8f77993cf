"""The linears for few rows: project_fp8, project_bf16 and project_groups."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL, matmul
from dsuf.reference.quant import FP8
from dsuf.reference.weights import dequantise_dense
from tests.kernels.gpu import Gpu, assert_bf16, draw_bf16, draw_e4m3, draw_e8m0, from_bf16, to_bf16

ROWS = [(0, 0), (1, 1), (3, 0), (8, 8), (9, 6), (17, 17), (32, 3), (41, 37)]
WIDTHS = {"dim": "dim", "q_lora": "q_lora", "o": "o_width", "engram": "engram_width", "taps": "tap_width"}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("n", [1, 16, 100])
def test_fp8(gpu: Gpu, rng: np.random.Generator, name: str, rows: int, live: int, n: int) -> None:
    """Random codes and scales, among them codes of zero and below the normal range; each row as it is alone."""
    k = gpu.sizes.named()[WIDTHS[name]]
    weight, scale = draw_e4m3(rng, n, k), draw_e8m0(rng, -(-n // 32), k // 32)
    packed = FP8.pack(from_bf16(to_bf16(rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-9, 9, (rows, 1)))))
    values = {"weight": weight, "weight_scale": scale, "n": n, "second": None, "second_n": 0}

    def project(first: int, last: int, count: int) -> np.ndarray:
        part = {"codes": packed[first:last, :k], "scales": packed[first:last, k:], "rows": last - first, "live": count}
        return gpu.run(f"project_fp8_{name}", {"out": ("bf16", (last - first, n))}, **values, **part)["out"]

    found = project(0, rows, live)
    expected = OFFICIAL.act(matmul(FP8.unpack(packed), dequantise_dense(weight, scale).astype(np.float64)))
    assert_bf16(found[:live], expected[:live])
    assert not found[live:].any()
    for row in range(min(live, 3)):
        np.testing.assert_array_equal(project(row, row + 1, 1)[0], found[row])


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_fp8_of_two(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """Two matrices in one launch give what each gives alone."""
    k, parts = gpu.sizes.dim, (32, 40)
    weight, scale = draw_e4m3(rng, sum(parts), k), draw_e8m0(rng, -(-sum(parts) // 32), k // 32)
    packed = FP8.pack(from_bf16(draw_bf16(rng, rows, k)))
    values = {"codes": packed[:, :k], "scales": packed[:, k:], "rows": rows, "live": live}
    out = {"out": ("bf16", (rows, parts[0])), "second": ("bf16", (rows, parts[1]))}
    both = gpu.run("project_fp8_dim", out, weight=weight, weight_scale=scale, n=parts[0], second_n=parts[1], **values)
    for name, (first, last) in {"out": (0, parts[0]), "second": (parts[0], sum(parts))}.items():
        alone = gpu.run(
            "project_fp8_dim", {"out": ("bf16", (rows, last - first))}, weight=weight[first:last],
            weight_scale=scale[first // 32 :], n=last - first, second=None, second_n=0, **values,
        )  # fmt: skip
        np.testing.assert_array_equal(both[name], alone["out"])


@pytest.mark.parametrize("name", ["dim", "head_dim", "few"])
@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("n", [1, 24, 100])
def test_bf16(gpu: Gpu, rng: np.random.Generator, name: str, rows: int, live: int, n: int) -> None:
    """Float32 within its rounding, and its own BF16 rounding."""
    k = gpu.sizes.named()["dim" if name == "few" else name]
    x, weight = draw_bf16(rng, rows, k), draw_bf16(rng, n, k)
    out = {"out": ("f32", (rows, n)), "rounded": ("bf16", (rows, n))}
    found = gpu.run(f"project_bf16_{name}", out, x=x, weight=weight, rows=rows, n=n, live=live)
    expected = matmul(from_bf16(x), from_bf16(weight).astype(np.float64))
    np.testing.assert_allclose(found["out"][:live], expected[:live], rtol=1e-4, atol=1e-6 * k**0.5 * 4)
    np.testing.assert_array_equal(found["rounded"], to_bf16(found["out"]))
    assert not found["out"][live:].any()
    for row in range(min(live, 3)):
        alone = gpu.run(
            f"project_bf16_{name}", {"out": ("f32", (1, n))}, x=x[row : row + 1], weight=weight, rounded=None, rows=1,
            n=n, live=1,
        )  # fmt: skip
        np.testing.assert_array_equal(alone["out"][0], found["out"][row])


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_groups(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """A matrix a group, inputs not quantised."""
    groups, rank, k = gpu.sizes.o_groups, gpu.sizes.o_lora, gpu.sizes.named()["group_width"]
    x = draw_bf16(rng, rows, groups, k)
    weight, scale = draw_e4m3(rng, groups * rank, k), draw_e8m0(rng, groups * rank // 32, k // 32)
    out = {"out": ("bf16", (rows, groups, rank)), "codes": ("u8", (rows, groups * rank))}
    out |= {"scales": ("u8", (rows, groups * rank // 32))}
    values = {"weight": weight, "weight_scale": scale}
    both = gpu.run("project_groups", out, x=x, **values, rows=rows, live=live)
    found, packed = both["out"], np.concatenate([both["codes"], both["scales"]], axis=1)
    np.testing.assert_array_equal(packed[:live], FP8.pack(from_bf16(found[:live].reshape(live, groups * rank))))
    assert not packed[live:].any()
    for row in range(min(live, 2)):
        alone = gpu.run("project_groups", {n: (k, (1, *s[1:])) for n, (k, s) in out.items()}, x=x[row : row + 1],
                        **values, rows=1, live=1)  # fmt: skip
        np.testing.assert_array_equal(alone["out"][0], found[row])
    if not live:
        assert not found.any()
        return
    wide = dequantise_dense(weight, scale).astype(np.float64).reshape(groups, rank, k)
    expected = np.einsum("rgk,gnk->rgn", from_bf16(x[:live]).astype(np.float64), wide, optimize=True)
    assert_bf16(found[:live], OFFICIAL.act(expected.astype(np.float32)))
    assert not found[live:].any()

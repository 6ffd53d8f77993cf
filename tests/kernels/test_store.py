"""Rotary angles, and rows on their way into the caches: norm, rotation, quantiser and place."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.norm import rms_norm
from dsuf.reference.quant import FP4_ENTRY, FP4_INDEX, FP8, Quantiser
from dsuf.reference.rope import Rope
from tests.kernels.gpu import Gpu, angles_of, assert_bf16, draw_bf16, from_bf16, some_positions, to_bf16

ROWS = [(0, 0), (1, 1), (5, 3), (9, 9)]
STORES = {"store_window": ("head_dim", FP8), "store_entry": ("head_dim", FP4_ENTRY),
          "store_index_key": ("index_dim", FP4_INDEX)}  # fmt: skip


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_angles(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """The reference's cosines and sines, to the bit, of both tables and of the groups' positions."""
    positions = some_positions(rows)
    window, compressed = (Rope(gpu.config, compressed=kind) for kind in (False, True))
    found = gpu.run(
        "place_angles", {"angles": ("f32", (3, rows, gpu.sizes.rope_dim))}, positions=positions,
        group_positions=positions // 2 * 2, window=window.frequencies, compressed=compressed.frequencies, live=live,
        rows=rows,
    )["angles"]  # fmt: skip
    expected = (angles_of(window, positions), angles_of(compressed, positions),
                angles_of(compressed, positions // 2 * 2))  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours[:live], theirs[:live])
        assert not ours[live:].any()


def draw_rows(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Rows of very different size, the first of zeros."""
    x = to_bf16(rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-30, 30, (rows, 1)))
    x[:1] = 0
    return x


def check_stored(gpu: Gpu, normed: np.ndarray, turned: np.ndarray, packed: np.ndarray, positions: np.ndarray,
                 quantiser: Quantiser) -> None:  # fmt: skip
    """What is turned is the rotation of what is normed, to the bit, and what is packed the form of that."""
    rotation = Rope(gpu.config, compressed=True).rotation(positions)
    np.testing.assert_array_equal(from_bf16(turned), rotation.apply(from_bf16(normed), OFFICIAL))
    np.testing.assert_array_equal(packed, quantiser.pack(from_bf16(turned)))


@pytest.mark.parametrize("entry", STORES)
@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("placed", [False, True])
def test_stored(gpu: Gpu, rng: np.random.Generator, entry: str, rows: int, live: int, placed: bool) -> None:
    """Rows go where `place` says, and nothing else of the store changes; without it row to row, padding zero."""
    name, quantiser = STORES[entry]
    width = getattr(gpu.sizes, name)
    x, weight, positions = draw_rows(rng, rows, width), draw_bf16(rng, width), some_positions(rows)
    place = rng.permutation(rows + 4)[:rows].astype(np.int64)
    place[1:2] = -1
    row_bytes = quantiser.row_bytes(width)
    store = rng.integers(0, 256, (rows + 4, row_bytes), np.uint8)
    out = {"normed": ("bf16", (rows, width)), "turned": ("bf16", (rows, width)), "packed": store}
    values = {"weight": weight, "angles": angles_of(Rope(gpu.config, compressed=True), positions)}
    found = gpu.run(entry, out, x=x, place=place if placed else None, live=live, row_bytes=row_bytes, rows=rows,
                    **values)  # fmt: skip
    expected = rms_norm(from_bf16(x), from_bf16(weight), gpu.config.norm_eps, OFFICIAL)
    assert_bf16(found["normed"][:live], expected[:live], share=0.002)
    assert not found["normed"][live:].any()
    assert not found["turned"][live:].any()
    goes = np.arange(rows) if not placed else place
    own = np.flatnonzero((np.arange(rows) < live) & (goes >= 0))
    check_stored(gpu, found["normed"][own], found["turned"][own], found["packed"][goes[own]], positions[own], quantiser)
    others = np.setdiff1d(np.arange(rows + 4), goes[own])
    left = store.copy()
    if not placed:
        left[live:rows] = 0
    np.testing.assert_array_equal(found["packed"][others], left[others])


@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("placed", [False, True])
def test_latents(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, placed: bool) -> None:
    """Query latents with their FP8 form, and the window rows that store_window makes."""
    width, dim, row_bytes = gpu.sizes.q_lora, gpu.sizes.head_dim, FP8.row_bytes(gpu.sizes.head_dim)
    latent, key, positions = draw_rows(rng, rows, width), draw_rows(rng, rows, dim), some_positions(rows)
    weight, key_weight = draw_bf16(rng, width), draw_bf16(rng, dim)
    place = rng.permutation(rows + 2)[:rows].astype(np.int64) if placed else None
    common = {
        "place": place, "angles": angles_of(Rope(gpu.config, compressed=False), positions), "live": live, "rows": rows,
        "row_bytes": row_bytes,
    }  # fmt: skip
    kept = {"turned": ("bf16", (rows, dim)), "packed": np.full((rows + 2, row_bytes), 7, np.uint8)}
    out = {"query": ("bf16", (rows, width)), "codes": ("u8", (rows, width)), "scales": ("u8", (rows, width // 32))}
    found = gpu.run("norm_latents", out | kept, latent=latent, weight=weight, key=key, key_weight=key_weight, **common)
    expected = rms_norm(from_bf16(latent), from_bf16(weight), gpu.config.norm_eps, OFFICIAL)
    assert_bf16(found["query"][:live], expected[:live], share=0.002)
    packed = np.concatenate([found["codes"], found["scales"]], axis=1)
    np.testing.assert_array_equal(packed[:live], FP8.pack(from_bf16(found["query"][:live])))
    assert not packed[live:].any()
    assert not found["query"][live:].any()
    alone = gpu.run("store_window", kept, x=key, weight=key_weight, normed=None, **common)
    for name in kept:
        np.testing.assert_array_equal(found[name], alone[name])


@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_index_queries(gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
    """What the turned and quantised queries mean, to the bit, and the scaled weights of their heads."""
    heads, dim, positions = gpu.sizes.index_heads, gpu.sizes.index_dim, some_positions(rows)
    q, weights = draw_bf16(rng, rows, heads, dim, scale=5), draw_bf16(rng, rows, heads)
    rope = Rope(gpu.config, compressed=True)
    found = gpu.run(
        "index_queries", {"meaning": ("bf16", (rows, heads, dim)), "weights": weights}, q=q,
        angles=angles_of(rope, positions), live=live, rows=rows,
    )  # fmt: skip
    turned = rope.rotation(positions).apply(from_bf16(q), OFFICIAL)
    np.testing.assert_array_equal(found["meaning"][:live], to_bf16(FP4_INDEX.roundtrip(turned))[:live])
    assert not found["meaning"][live:].any()
    scaled = OFFICIAL.act(from_bf16(weights) * np.float32(dim**-0.5 * heads**-0.5))
    np.testing.assert_array_equal(from_bf16(found["weights"])[:live], scaled[:live])
    np.testing.assert_array_equal(found["weights"][live:], weights[live:])

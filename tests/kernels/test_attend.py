"""attend_sparse against the reference's online softmax, over packed cache rows."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.quant import FP4_ENTRY, FP8
from dsuf.reference.rope import Rope
from dsuf.reference.sparse import attend
from tests.kernels.gpu import Gpu, angles_of, assert_bf16, draw_bf16, from_bf16, some_positions


def draw_slots(rng: np.random.Generator, rows: int, count: int, stored: int) -> np.ndarray:
    """Row numbers without repeats, -1 after a random number of them; the first row has none, the last all."""
    slots = np.argsort(rng.random((rows, max(stored, count))), axis=1)[:, :count].astype(np.int32)
    slots[slots >= stored] = -1
    slots[np.arange(count) >= rng.integers(0, count + 1, (rows, 1))] = -1
    slots[:1] = -1
    return slots


def assert_pairs(found: np.ndarray, expected: np.ndarray, largest: np.ndarray) -> None:
    """Within six BF16 steps of the larger of a turned pair: an error of the one is seen in the other."""
    if not expected.size:
        return
    pairs = np.abs(expected).reshape(*expected.shape[:-1], -1, 2).max(axis=-1)
    magnitude = np.maximum(np.repeat(pairs, 2, axis=-1), np.maximum(largest * 2.0**-8, 1e-30))
    assert (np.abs(found - expected) / 2.0 ** (np.floor(np.log2(magnitude)) - 7)).max() <= 6


@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 1), (2, 2), (5, 3)])
@pytest.mark.parametrize("heads", [1, 8, 17])
@pytest.mark.parametrize(("window", "selected"), [(1, 0), (16, 8), (64, 64), (128, 0), (128, 512), (63, 66)])
def test_attention(
    gpu: Gpu, rng: np.random.Generator, rows: int, live: int, heads: int, window: int, selected: int
) -> None:
    """Slots of both kinds, window rows in both places, heads that fill no tile, rows without slots; a row as alone.

    Queries are turned to their positions and results turned back, each rounded.
    """
    dim, stored = gpu.sizes.head_dim, 3 * max(window, selected) + 1
    window_rows = FP8.pack(from_bf16(draw_bf16(rng, stored, dim)))
    entry_rows = FP4_ENTRY.pack(from_bf16(draw_bf16(rng, stored, dim)))
    q = draw_bf16(rng, rows, heads, dim, scale=3)
    sink = rng.standard_normal(heads, np.float32) * 3
    slots, chosen = draw_slots(rng, rows, window, stored), draw_slots(rng, rows, selected, stored)
    rope, positions = Rope(gpu.config, compressed=selected > 0), some_positions(rows)
    rotation, angles = rope.rotation(positions), angles_of(rope, positions)
    values = {"window": window_rows[: stored // 2], "fresh": window_rows[stored // 2 :], "entries": entry_rows}
    values |= {"sink": sink, "heads": heads, "window_slots": window, "entry_slots": selected}
    split = np.where(slots >= stored // 2, -2 - (slots - stored // 2), slots).astype(np.int32)

    def run(first: int, last: int, count: int) -> np.ndarray:
        part = {"q": q[first:last], "slots": split[first:last], "selected": chosen[first:last], "live": count}
        part |= {"angles": angles[first:last], "early": (last - first) % 2}
        out = {"out": ("bf16", (last - first, heads, dim))}
        return gpu.run("attend_sparse", out, **values, **part, rows=last - first)["out"]

    found = run(0, rows, live)
    stacked = np.concatenate([FP8.unpack(window_rows), FP4_ENTRY.unpack(entry_rows)]).astype(np.float64)
    moved = np.concatenate([slots, np.where(chosen >= 0, chosen + stored, -1)], axis=1)
    turned = rotation.apply(from_bf16(q), OFFICIAL)
    expected = attend(turned, stacked, moved.astype(np.int64), sink, OFFICIAL)
    plain = dim - gpu.sizes.rope_dim
    assert_bf16(found[:live, :, :plain], expected[:live, :, :plain], steps=4, share=0.2)
    back = rotation.apply(expected, OFFICIAL, inverse=True)[:live, :, plain:]
    assert_pairs(from_bf16(found[:live, :, plain:]), back, largest=np.abs(expected[:live]).max(axis=-1, keepdims=True))
    assert not found[live:].any()
    for row in range(live):
        np.testing.assert_array_equal(run(row, row + 1, 1)[0], found[row])

"""score_index and select_rows: which entries a row attends to."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.indexer import Indexer, select
from dsuf.reference.quant import FP4_INDEX
from tests.kernels.gpu import Gpu, assert_bf16, draw_bf16, from_bf16, to_bf16


@pytest.mark.parametrize("entries", [1, 7, 63, 64, 65, 1000])
@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 1), (6, 4)])
def test_scores(gpu: Gpu, rng: np.random.Generator, entries: int, rows: int, live: int) -> None:
    """Scores of what a row may see, -inf past it; each row as it is alone."""
    heads, width = gpu.sizes.index_heads, gpu.sizes.index_dim
    keys = FP4_INDEX.pack(from_bf16(draw_bf16(rng, entries, width)))
    q = FP4_INDEX.roundtrip(from_bf16(draw_bf16(rng, rows, heads, width)))
    weights = draw_bf16(rng, rows, heads, scale=0.02)
    reachable = np.array([entries, 0, entries // 2, 1, entries, entries][:rows], np.int32)

    def run(first: int, last: int, count: int) -> np.ndarray:
        part = {"q": to_bf16(q[first:last]), "weights": weights[first:last], "reachable": reachable[first:last]}
        out = {"scores": ("f32", (last - first, entries))}
        return gpu.run("score_index", out, keys=keys, **part, live=count, rows=last - first, entries=entries)["scores"]

    found = run(0, rows, live)
    indexer = object.__new__(Indexer)
    indexer.arithmetic = OFFICIAL
    expected = indexer.scores(q, from_bf16(weights), FP4_INDEX.unpack(keys).astype(np.float64))
    for row in range(live):
        seen = reachable[row]
        assert_bf16(to_bf16(found[row : row + 1, :seen]), expected[row : row + 1, :seen])
        np.testing.assert_array_equal(found[row, :seen], from_bf16(to_bf16(found[row, :seen])))
        assert np.isneginf(found[row, seen:]).all()
        np.testing.assert_array_equal(run(row, row + 1, 1)[0], found[row])
    assert np.isneginf(found[live:]).all()


@pytest.mark.parametrize("entries", [1, 8, 511, 512, 513, 1024, 1025, 5000])
@pytest.mark.parametrize("count", [1, 8, 512])
@pytest.mark.parametrize("kinds", [1, 3, 100_000])
def test_selection(gpu: Gpu, rng: np.random.Generator, entries: int, count: int, kinds: int) -> None:
    """Exactly the reference's choice, with many equal scores and both zeros among them."""
    rows, live = 6, 5
    scores = from_bf16(to_bf16((rng.integers(0, kinds, (rows, entries)) - kinds // 2) * 0.37))
    scores[scores == 0] *= np.where(rng.random(np.count_nonzero(scores == 0)) < 0.5, -1, 1)
    reachable = np.array([entries, 0, entries // 2, 1, entries, entries], np.int32)
    allowed = np.arange(entries) < reachable[:, None]
    found = gpu.run(
        "select_rows", {"selected": ("i32", (rows, count))}, scores=np.where(allowed, scores, np.float32(-np.inf)),
        reachable=reachable, live=live, rows=rows, entries=entries, count=count,
    )["selected"]  # fmt: skip
    np.testing.assert_array_equal(found[:live], select(scores, allowed, count)[:live])
    assert (found[live:] == -1).all()

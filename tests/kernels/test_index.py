"""score_index, select_rows and mark_blocks: which entries a row attends to, through page tables of several turns."""

from typing import NamedTuple

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.indexer import Indexer, candidate_mask, select
from dsuf.reference.quant import FP4_INDEX
from tests.kernels.gpu import Gpu, assert_bf16, draw_bf16, from_bf16, to_bf16

PAGE_ROWS = 16


class Paged(NamedTuple):
    """Rows of three turns, whose pages lie in any order."""

    row_slot: np.ndarray
    reachable: np.ndarray
    table: np.ndarray
    entries: int

    def rows_of(self, slot: int, places: np.ndarray) -> np.ndarray:
        """Rows of the store at `places` of a turn."""
        return self.table[slot, places // PAGE_ROWS] * PAGE_ROWS + places % PAGE_ROWS

    def fields(self) -> dict[str, int]:
        """Their numbers as the kernels take them."""
        return {"table_pages": self.table.shape[1], "page_rows": PAGE_ROWS}


def draw_pages(rng: np.random.Generator, entries: int) -> Paged:
    """Eleven rows, more than a block of the kernel does, of which turns see up to `entries`."""
    row_slot = np.array([2, 2, 2, 0, 0, 1, 1, 1, 1, 1, 1], np.int32)
    reachable = np.array([entries - 1, entries, 1, 0, entries, 1, 2, entries // 2, entries, entries, 3], np.int32)
    pages = -(-entries // PAGE_ROWS)
    table = rng.permutation(3 * pages + 2)[: 3 * pages].reshape(3, pages).astype(np.int32)
    return Paged(row_slot, np.clip(reachable, 0, entries), table, -(-entries // 8) * 8)


def bare_indexer() -> Indexer:
    """An indexer without weights, for its scores."""
    indexer = object.__new__(Indexer)
    indexer.arithmetic = OFFICIAL
    return indexer


@pytest.mark.parametrize("entries", [1, 7, 63, 64, 65, 1000])
@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 1), (6, 4), (11, 10)])
def test_scores(gpu: Gpu, rng: np.random.Generator, entries: int, rows: int, live: int) -> None:
    """Scores of what a row may see, nothing past it; each row as it is alone."""
    heads, width = gpu.sizes.index_heads, gpu.sizes.index_dim
    paged = draw_pages(rng, entries)
    keys = FP4_INDEX.pack(from_bf16(draw_bf16(rng, (paged.table.max() + 1) * PAGE_ROWS, width)))
    q = FP4_INDEX.roundtrip(from_bf16(draw_bf16(rng, rows, heads, width)))
    weights = draw_bf16(rng, rows, heads, scale=0.02)
    common = {"keys": keys, "table": paged.table, "entries": paged.entries, **paged.fields()}
    common |= {"blocks": None, "block_count": 0, "block_size": 1}

    def run(first: int, last: int, count: int) -> np.ndarray:
        part = {"q": to_bf16(q[first:last]), "weights": weights[first:last], "reachable": paged.reachable[first:last]}
        part |= {"row_slot": paged.row_slot[first:last], "live": count, "rows": last - first}
        return gpu.run("score_index", {"scores": ("bf16", (last - first, paged.entries))}, **common, **part)["scores"]

    found = run(0, rows, live)
    for row in range(live):
        seen = paged.reachable[row]
        own = FP4_INDEX.unpack(keys[paged.rows_of(paged.row_slot[row], np.arange(seen))]).astype(np.float64)
        expected = bare_indexer().scores(q[row : row + 1], from_bf16(weights[row : row + 1]), own)
        assert_bf16(found[row : row + 1, :seen], expected)
        assert (found[row, seen:] == 0xFFFF).all()
        np.testing.assert_array_equal(run(row, row + 1, 1)[0], found[row])
    assert (found[live:] == 0xFFFF).all()


@pytest.mark.parametrize("block_size", [4, 8])
def test_scores_inside_blocks(gpu: Gpu, rng: np.random.Generator, block_size: int) -> None:
    """Only the given blocks are scored, and each score is that of the whole row."""
    heads, width, entries, count = gpu.sizes.index_heads, gpu.sizes.index_dim, 500, 20
    paged, rows = draw_pages(rng, entries), 11
    keys = FP4_INDEX.pack(from_bf16(draw_bf16(rng, (paged.table.max() + 1) * PAGE_ROWS, width)))
    common = {
        "q": to_bf16(FP4_INDEX.roundtrip(from_bf16(draw_bf16(rng, rows, heads, width)))), "keys": keys,
        "weights": draw_bf16(rng, rows, heads, scale=0.02), "row_slot": paged.row_slot, "table": paged.table,
        "live": rows, "rows": rows, "block_count": count, "block_size": block_size, **paged.fields(),
    }  # fmt: skip
    whole = gpu.run(
        "score_index", {"scores": ("bf16", (rows, paged.entries))}, **common, blocks=None,
        reachable=np.full(rows, entries, np.int32), entries=paged.entries,
    )["scores"]  # fmt: skip
    blocks = np.sort(np.argsort(rng.random((rows, entries // block_size)), axis=1)[:, :count], axis=1).astype(np.int32)
    inside = np.array([count * block_size - i % block_size for i in range(rows)], np.int32)
    found = gpu.run(
        "score_index", {"scores": ("bf16", (rows, 200))}, **common, blocks=blocks, reachable=inside, entries=200
    )["scores"]
    places = (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(rows, -1)
    for row in range(rows):
        np.testing.assert_array_equal(found[row, : inside[row]], whole[row, places[row, : inside[row]]])
        assert (found[row, inside[row] :] == 0xFFFF).all()


def draw_scores(rng: np.random.Generator, rows: int, entries: int, kinds: int) -> np.ndarray:
    """BF16 values of some kinds, both zeros among them."""
    scores = from_bf16(to_bf16((rng.integers(0, kinds, (rows, entries)) - kinds // 2) * 0.37))
    scores[scores == 0] *= np.where(rng.random(np.count_nonzero(scores == 0)) < 0.5, -1, 1)
    return scores


@pytest.mark.parametrize("entries", [1, 8, 511, 512, 513, 1024, 1025, 5000, 40_000])
@pytest.mark.parametrize("count", [1, 8, 512])
@pytest.mark.parametrize("kinds", [1, 3, 100_000])
def test_selection(gpu: Gpu, rng: np.random.Generator, entries: int, count: int, kinds: int) -> None:
    """Exactly the reference's choice, with many equal scores and both zeros among them, as places and as rows."""
    paged, rows, live = draw_pages(rng, entries), 11, 10
    scores = draw_scores(rng, rows, paged.entries, kinds)
    allowed = np.arange(paged.entries) < paged.reachable[:, None]
    common = {
        "scores": to_bf16(np.where(allowed, scores, np.float32(np.nan))), "row_slot": paged.row_slot, "blocks": None,
        "reachable": paged.reachable, "live": live, "rows": rows, "entries": paged.entries, "count": count,
        "block_count": 0, "block_size": 1, **paged.fields(),
    }  # fmt: skip
    out = {"selected": ("i32", (rows, count))}
    expected = select(scores, allowed, count)[:live]
    found = gpu.run("select_rows", out, **common, table=None)["selected"]
    np.testing.assert_array_equal(found[:live], expected)
    assert (found[live:] == -1).all()
    found = gpu.run("select_rows", out, **common, table=paged.table)["selected"]
    for row in range(live):
        moved = paged.rows_of(paged.row_slot[row], expected[row])
        np.testing.assert_array_equal(found[row], np.where(expected[row] < 0, -1, moved))


@pytest.mark.parametrize("entries", [1, 8, 9, 100, 1000, 20_000])
@pytest.mark.parametrize(("count", "size"), [(1, 8), (6, 4), (128, 8), (2048, 8)])
@pytest.mark.parametrize("kinds", [1, 3, 100_000])
def test_blocks(gpu: Gpu, rng: np.random.Generator, entries: int, count: int, size: int, kinds: int) -> None:
    """The reference's candidates, and inside them the reference's choice."""
    paged, rows, live, picks = draw_pages(rng, entries), 11, 10, 16
    scores = draw_scores(rng, rows, paged.entries, kinds)
    allowed = np.arange(paged.entries) < paged.reachable[:, None]
    common = {"reachable": paged.reachable, "live": live, "rows": rows, "block_count": count, "block_size": size}
    found = gpu.run(
        "mark_blocks", {"blocks": ("i32", (rows, count)), "inside": ("i32", (rows,))}, **common,
        scores=to_bf16(np.where(allowed, scores, np.float32(np.nan))), entries=paged.entries,
    )  # fmt: skip
    masked = np.where(allowed, scores, np.float32(-np.inf))
    mask = candidate_mask(masked, paged.reachable, count, size) & allowed
    places = (found["blocks"][:, :, None] * size + np.arange(size)).reshape(rows, -1)
    width = -(-count * size // 8) * 8
    compact = np.full((rows, width), np.nan, np.float32)
    for row in range(live):
        np.testing.assert_array_equal(places[row, : found["inside"][row]], np.flatnonzero(mask[row]))
        assert (found["blocks"][row, -(-found["inside"][row] // size) :] == -1).all()
        compact[row, : found["inside"][row]] = scores[row, np.flatnonzero(mask[row])]
    assert (found["blocks"][live:] == -1).all()
    assert not found["inside"][live:].any()
    chosen = gpu.run(
        "select_rows", {"selected": ("i32", (rows, picks))}, scores=to_bf16(compact), row_slot=paged.row_slot,
        table=None, blocks=found["blocks"], **common | {"reachable": found["inside"]}, entries=width, count=picks,
        **paged.fields(),
    )["selected"]  # fmt: skip
    np.testing.assert_array_equal(chosen[:live], select(scores, mask, picks)[:live])

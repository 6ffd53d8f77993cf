"""Rows found through a page table are the rows of a growing store; pages travel as they are."""

import numpy as np
import pytest

from dsuf.errors import EngineFailed
from dsuf.reference.arithmetic import I64, OFFICIAL
from dsuf.reference.model import Model
from dsuf.reference.pages import PAGE_TOKENS, PagePool, PageTable
from dsuf.reference.rows import GrowingRows
from tests.reference.conftest import small_config
from tests.reference.test_invariance import ALL


def make_pool(count: int = 12) -> PagePool:
    pool = PagePool(small_config(), OFFICIAL, count)
    pool.pages[:] = np.random.default_rng(3).integers(0, 256, pool.pages.shape)  # what nobody wrote is not zero
    return pool


def make_table(pool: PagePool, count: int, seed: int = 0) -> PageTable:
    return PageTable(pool, np.random.default_rng(seed).permutation(len(pool.pages))[:count].tolist())


@pytest.mark.parametrize("kind", ["entries", "index_keys"])
@pytest.mark.parametrize("layer", [2, 5], ids=["ratio 2", "ratio 1"])
def test_paged_rows_are_those_of_a_growing_store(layer: int, kind: str) -> None:
    rng, pool = np.random.default_rng(1), make_pool()
    paged = make_table(pool, 5).rows(layer, kind)
    row_bytes = pool.part(layer, kind).shape[2]
    growing, length, most = GrowingRows(row_bytes), 0, 5 * PAGE_TOKENS // small_config().ratio(layer)
    for _ in range(300):
        start, count = int(rng.integers(0, length + 1)), int(rng.integers(1, 90))
        rows = rng.integers(0, 256, (min(count, most - start), row_bytes), np.uint8)
        for store in (paged, growing):
            store.put(start, rows)
        length = max(length, start + len(rows))
        first = int(rng.integers(0, length))
        chosen = rng.integers(0, length, 30)
        for wanted in (slice(first, length), slice(length), slice(first, int(rng.integers(first, length)) + 1), chosen):
            assert np.array_equal(paged.get(wanted), growing.get(wanted))
    assert length == most


def test_rows_of_one_turn_never_touch_the_pages_of_another() -> None:
    pool = make_pool()
    before, table = pool.pages.copy(), make_table(pool, 4)
    for layer in small_config().kv_source_layers:
        for kind in ("entries", "index_keys"):
            rows = table.rows(layer, kind)
            size = pool.part(layer, kind).shape
            rows.put(0, np.full((4 * size[1], size[2]), 7, np.uint8))
    others = np.setdiff1d(np.arange(len(pool.pages)), table.pages)
    assert np.array_equal(pool.pages[others], before[others])
    assert (pool.pages[table.pages] == 7).all(), "the parts of a page leave nothing out"
    with pytest.raises(IndexError):
        rows.put(4 * size[1] - 1, np.zeros((2, size[2]), np.uint8))


def test_a_page_travels_as_it_is() -> None:
    here, there = make_pool(), make_pool(3)
    page = bytearray(here.page_bytes)
    here.read(5, memoryview(page))
    there.write(2, memoryview(page).toreadonly())
    assert np.array_equal(there.pages[2], here.pages[5])
    for size in (here.page_bytes - 1, here.page_bytes + 1, 1, 0):
        with pytest.raises(ValueError, match="for a page of"):
            here.read(5, memoryview(bytearray(size)))
        with pytest.raises(ValueError, match="for a page of"):
            here.write(5, memoryview(bytes(size)))


@pytest.mark.parametrize("pages", [[0, 12], [-1]], ids=str)
def test_pages_that_are_not_there_are_refused(pages: list[int]) -> None:
    with pytest.raises(EngineFailed, match="pages 0 to 11"):
        PageTable(make_pool(), pages)


def test_a_sequence_in_pages_is_one_with_stores_of_its_own(model: Model, ids: I64) -> None:
    """Logits and bytes, while two sequences with interleaved pages grow in one batch."""
    pool = make_pool()
    order = np.random.default_rng(2).permutation(12).tolist()
    paged = [model.new_cache(PageTable(pool, order[:4])), model.new_cache(PageTable(pool, order[4:8]))]
    alone = [model.new_cache(), model.new_cache()]
    long, short = np.tile(ids, 2), ids[20:]
    for part in (slice(0, 90), slice(90, 91), slice(91, 126), slice(126, 130)):
        expected, output = (model.forward([(a, long[part]), (b, short[part])]) for a, b in (alone, paged))
        assert np.array_equal(model.logits(output, ALL), model.logits(expected, ALL))
    for own, cache in zip(alone, paged, strict=True):
        assert cache.global_bytes() == own.global_bytes()
        cache.truncate(127)
        own.truncate(127)
    expected, output = (model.forward([(a, long[127:290]), (b, short[:1])]) for a, b in (alone, paged))
    assert np.array_equal(model.logits(output, ALL), model.logits(expected, ALL))
    assert [cache.global_bytes() for cache in paged] == [cache.global_bytes() for cache in alone]

"""The pages in which an engine keeps the global cache rows of its turns.

A page holds the rows that `PAGE_TOKENS` positions make: for each Full layer its compressed entries, then its index
keys. It is one piece of memory and travels as it is. Which turn owns which page is not decided here.
"""

from collections.abc import Sequence

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.errors import EngineFailed
from dsuf.reference.arithmetic import I64, Arithmetic, Bytes
from dsuf.reference.rows import RowFormats

PAGE_TOKENS = 128
"""A multiple of every compression ratio, so that no group of positions lies in two pages."""


class PagePool:
    """`count` pages [count, page_bytes]. The memory is reserved at once and taken up as pages are first written."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, count: int) -> None:
        formats, self._parts = RowFormats(arithmetic), dict[tuple[int, str], tuple[int, int, int]]()
        self.page_bytes = 0
        for layer in config.kv_source_layers:
            rows = PAGE_TOKENS // config.ratio(layer)
            for kind, row_bytes in (
                ("entries", formats.entry.row_bytes(config.head_dim)),
                ("index_keys", formats.index_key.row_bytes(config.index_head_dim)),
            ):
                self._parts[layer, kind] = (self.page_bytes, rows, row_bytes)
                self.page_bytes += rows * row_bytes
        self.pages: Bytes = np.zeros((count, self.page_bytes), np.uint8)

    def part(self, layer: int, kind: str) -> Bytes:
        """The rows of a Full layer in all pages, as a view [count, rows of a page, row_bytes].

        `kind` is "entries" or "index_keys".
        """
        first, rows, row_bytes = self._parts[layer, kind]
        return self.pages[:, first : first + rows * row_bytes].reshape(len(self.pages), rows, row_bytes)

    def read(self, page: int, into: memoryview) -> None:
        """Copy a page into a buffer of `page_bytes`; raises `ValueError` where it is of another size."""
        _as_page(into, self.page_bytes)[:] = self.pages[page]

    def write(self, page: int, rows: memoryview) -> None:
        """Fill a page from a buffer of `page_bytes`; raises `ValueError` where it is of another size."""
        self.pages[page] = _as_page(rows, self.page_bytes)


def _as_page(buffer: memoryview, size: int) -> Bytes:
    """The bytes of `buffer` as an array of `size`; raises `ValueError`."""
    if buffer.nbytes != size:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes for a page of {size}")
    return np.frombuffer(buffer, np.uint8)


class PageTable:
    """The pages of one turn, in the order of the positions that they hold; raises `EngineFailed` for unknown ones."""

    def __init__(self, pool: PagePool, pages: Sequence[int]) -> None:
        self.pool = pool
        self.pages: I64 = np.array(pages, np.int64)
        if len(pages) and not 0 <= self.pages.min() <= self.pages.max() < len(pool.pages):
            raise EngineFailed(f"There are pages 0 to {len(pool.pages) - 1}, the turn's are outside of that.")

    def rows(self, layer: int, kind: str) -> "PagedRows":
        """The turn's rows of a Full layer; `kind` as in `PagePool.part`."""
        return PagedRows(self.pool.part(layer, kind), self.pages)


class PagedRows:
    """Rows of one turn, found through its page table; implements `PackedRows`."""

    nbytes = 0

    def __init__(self, part: Bytes, pages: I64) -> None:
        self._part, self._pages, self._page_rows = part, pages, part.shape[1]

    def get(self, rows: slice | I64) -> Bytes:
        """A copy of `rows`; a slice takes whole pages and then cuts, which is faster than row by row."""
        size = self._page_rows
        if not isinstance(rows, slice):
            found: Bytes = self._part[self._pages[rows // size], rows % size]
            return found
        start, stop = rows.start or 0, rows.stop
        first = start // size
        whole: Bytes = self._part[self._pages[first : -(-stop // size)]].reshape(-1, self._part.shape[2])
        return whole[start - first * size : stop - first * size]

    def put(self, start: int, packed: Bytes) -> None:
        """Put `packed` at `start` and after; raises `IndexError` past the last page."""
        at = np.arange(start, start + len(packed))
        self._part[self._pages[at // self._page_rows], at % self._page_rows] = packed

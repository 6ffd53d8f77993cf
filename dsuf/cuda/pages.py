"""Pages between the device and host buffers, on a stream of their own.

In a host buffer a page is, for every Full layer in order, its entries and then its index keys. Runs of neighbouring
pages are copied as one block of rows with a stride. Ranks have the same pages: the first's are read, all are written.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dsuf.cuda.arena import Arena, Array, view_host
from dsuf.cuda.caches import Caches
from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.streams import Event, Stream, Usable, handle_on

STAGED_PAGES = 64
"""Pages that are staged in pinned memory at once."""


def find_runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring pages: place in `pages`, first page, count."""
    start = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            yield start, pages[start], place - start
            start = place


class PageCopier:
    """Copies pages; for one thread, which it blocks until they are there. `close` frees its buffer."""

    def __init__(self, arena: Arena, caches: Caches, devices: Sequence[Usable] = ()) -> None:
        self.arena, self.caches, self.page_bytes = arena, caches, caches.sizes.page_bytes
        self._stream = Stream(devices=devices)
        size = STAGED_PAGES * self.page_bytes
        self._staged = Array(int(call(driver.cuMemHostAlloc(size, 0))), "u8", (STAGED_PAGES, self.page_bytes))

    def read(self, pages: Sequence[int], into: Sequence[memoryview], behind: Sequence[Event]) -> None:
        """Copy `pages`, as the work before the events `behind` leaves them, each into its buffer."""
        self._follow(behind)
        held = view_host(self._staged)
        for first in range(0, len(pages), STAGED_PAGES):
            part = pages[first : first + STAGED_PAGES]
            self._queue(part, reads=True)
            self._stream.synchronize()
            for place in range(len(part)):
                np.copyto(np.frombuffer(into[first + place], np.uint8), held[place])

    def write(self, pages: Sequence[int], rows: Sequence[memoryview], behind: Sequence[Event]) -> None:
        """Fill `pages`, each from its buffer, once the work before the events `behind` is done."""
        self._follow(behind)
        held = view_host(self._staged)
        for first in range(0, len(pages), STAGED_PAGES):
            part = pages[first : first + STAGED_PAGES]
            for place in range(len(part)):
                np.copyto(held[place], np.frombuffer(rows[first + place], np.uint8))
            self._queue(part, reads=False)
            self._stream.synchronize()

    def close(self) -> None:
        """Wait, and free the buffer."""
        self._stream.close()
        call(driver.cuMemFreeHost(self._staged.pointer))

    def _follow(self, behind: Sequence[Event]) -> None:
        for event in behind:
            self._stream.follow(event)
            event.close()

    def _queue(self, pages: Sequence[int], *, reads: bool) -> None:
        for place, page, count in find_runs(pages):
            offset = 0
            for store, rows in self._stores():
                width = store.bytes // store.shape[0] * rows
                block = driver.CUDA_MEMCPY2D()
                block.WidthInBytes, block.Height = width, count
                host, device = self._staged[place].pointer + offset, store.pointer + page * width
                for rank, shift in enumerate((0, *store.shifts)[: 1 if reads else None]):
                    _put_sides(block, host, self.page_bytes, device + shift, width, reads=reads)
                    call(driver.cuMemcpy2DAsync(block, handle_on(self._stream.handle, rank)))
                offset += width

    def _stores(self) -> Iterator[tuple[Array, int]]:
        """Every store with its rows a page, in the order of a host buffer."""
        for layer in self.caches.sizes.config.kv_source_layers:
            rows = self.caches.sizes.page_rows(layer)
            yield self.caches.entries(layer), rows
            yield self.caches.index_keys(layer), rows


def _put_sides(block: object, host: int, host_pitch: int, device: int, device_pitch: int, *, reads: bool) -> None:
    """Fill in where a block comes from and where it goes."""
    kinds, sides = driver.CUmemorytype, {True: "dst", False: "src"}
    for is_host, side in ((True, sides[reads]), (False, sides[not reads])):
        kind = kinds.CU_MEMORYTYPE_HOST if is_host else kinds.CU_MEMORYTYPE_DEVICE
        setattr(block, f"{side}MemoryType", kind)
        setattr(block, f"{side}Host" if is_host else f"{side}Device", host if is_host else device)
        setattr(block, f"{side}Pitch", host_pitch if is_host else device_pitch)

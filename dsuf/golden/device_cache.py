"""The cache of one sequence on the device, as the comparisons handle one: a slot and pages of a loaded machine."""

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import Array, read_array, write_array
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.machine import Machine
from dsuf.reference.arithmetic import F32, F64, I64
from dsuf.reference.cache import SequenceCache
from dsuf.reference.quant import FP4_ENTRY, FP4_INDEX, FP8, Quantiser
from dsuf.reference.rows import RowStore
from dsuf.types import Sampling

GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=1 << 20)


def round_bf16(values: F32) -> NDArray[np.uint16]:
    """BF16 bits of `values`."""
    bits: NDArray[np.uint16] = np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def read_values(array: Array, rows: int) -> NDArray[Any]:
    """The first `rows` rows of `array`; BF16 as float32."""
    found = read_array(array.rows(0, rows))
    return found.view(ml_dtypes.bfloat16).astype(np.float32) if array.kind == "bf16" else found


class DeviceStore(RowStore):
    """Rows of one kind of one Full layer in the pages of a sequence."""

    def __init__(self, array: Array, first: int, rows: int, quantiser: Quantiser) -> None:
        self.array, self.format, self.capacity = array.rows(first, first + rows), quantiser, rows

    def read(self, rows: slice | I64) -> F64:
        """The values of `rows`."""
        return self.format.unpack(read_array(self.array)[rows]).astype(np.float64)

    def write(self, start: int, rows: F32) -> None:
        """Put `rows` at `start` and after."""
        write_array(self.array.rows(start, start + len(rows)), self.format.pack(rows))

    def packed_bytes(self, count: int) -> bytes:
        """The first `count` rows as they lie there."""
        return read_array(self.array.rows(0, count)).tobytes()


class DeviceCache(SequenceCache):
    """A sequence in `slot`, its pages one behind the other; beginning one forgets what was in the slot."""

    def __init__(self, machine: Machine, slot: int, pages: int) -> None:
        self.machine, self.slot, self.config = machine, slot, machine.config
        self.pages = range(slot * pages, (slot + 1) * pages)
        self.length = self.decoded = self.drafted = 0
        self.ids: I64 = np.empty(0, np.int64)
        machine.turns.begin(slot, GREEDY, self.pages, 0)
        sources = self.config.kv_source_layers
        self.entries = {layer: self._store(layer, machine.caches.entries(layer), FP4_ENTRY) for layer in sources}
        self.index_keys = {layer: self._store(layer, machine.caches.index_keys(layer), FP4_INDEX) for layer in sources}

    def _store(self, layer: int, array: Array, quantiser: Quantiser) -> DeviceStore:
        return DeviceStore(array, self.first_row(layer), len(self.pages) * self.page_rows(layer), quantiser)

    def page_rows(self, layer: int) -> int:
        """Rows of a page of Full layer `layer`."""
        return PAGE_TOKENS // self.config.ratio(layer)

    def first_row(self, layer: int) -> int:
        """The physical row of entry 0 of Full layer `layer`."""
        return self.pages.start * self.page_rows(layer)

    def put_ids(self, start: int, ids: I64) -> None:
        """Record the token ids of positions `start` and after."""
        self.ids = np.concatenate([self.ids[:start], ids])

    def global_parts(self) -> Iterable[tuple[str, bytes]]:
        """Name and bytes of each part of the global cache."""
        for layer in self.config.kv_source_layers:
            rows = self.length // self.config.ratio(layer)
            for name, store in (("entries", self.entries[layer]), ("index_keys", self.index_keys[layer])):
                assert isinstance(store, DeviceStore)
                yield f"layers.{layer}.{name}", store.packed_bytes(rows)

    def window_rows(self, layer: int, start: int, stop: int) -> F32:
        """Window rows of backbone layer `layer` at positions `start` to `stop`, as cached."""
        ring = read_array(self.machine.caches.window(layer)[self.slot])
        return FP8.unpack(ring[np.arange(start, stop) % len(ring)])

    def ring_places(self, start: int, stop: int) -> I64:
        """Rows of a store of rings for positions `start` to `stop`; a later position takes the place of an earlier."""
        rows = self.machine.sizes.ring_rows
        places = self.slot * rows + np.arange(start, stop) % rows
        places[: max(0, stop - start - rows)] = -1
        return places


def device_cache(cache: SequenceCache) -> DeviceCache:
    """`cache`, which is one on the device."""
    assert isinstance(cache, DeviceCache)
    return cache

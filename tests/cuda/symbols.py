"""Launches run on symbols: what each row of each array depends on, and so whether two ways to queue a pass are one.

A value is a hash of the entry that made it and of all that it read: of its own row where the entry works row by row, of
all rows where it does not. Memory that nobody has written is known by its address within its rank.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import Array, Region
from dsuf.cuda.split import SPLIT
from dsuf.cuda.table import KERNELS

CHANGED = {"weights", "taps"}
"""Of what such entries write, the fields whose old contents count."""

Launches = Iterable[tuple[str, Mapping[str, Any]]]


class Symbols:
    """Memory of ranks that lie `stride` apart; `written` has the tables of addresses, `sizes` those of the model."""

    def __init__(
        self, sizes: Mapping[str, int], regions: Mapping[int, Region], written: Mapping[int, NDArray[Any]], stride: int
    ) -> None:
        self.sizes, self.regions, self.written, self.stride = sizes, regions, written, stride
        self.memory: dict[int, int] = {}

    def run(self, launches: Launches) -> None:
        """Run them in their order."""
        for entry, values in launches:
            if entry == "reduce_peers":
                self._reduce(values)
            elif entry == "gather_rows":
                self._gather(values)
            elif entry in SPLIT:
                self._run_rows(entry, values)
            elif entry != "announce_partial":
                self._run_whole(entry, values)

    def read(self, address: int) -> int:
        """What stands there."""
        return self.memory.get(address, hash(("untouched", address % self.stride)))

    def _table(self, array: Array) -> NDArray[Any]:
        """What was written where `array` is."""
        at = array.pointer % self.stride
        base = max(start for start in self.written if start <= at)
        table = self.written[base].reshape(-1)
        first = (at - base) // table.itemsize
        return table[first : first + int(np.prod(array.shape))].reshape(array.shape)

    def _reduce(self, values: Mapping[str, Any]) -> None:
        parts, row_bytes = self._table(values["partials"])[: values["ranks"]], 2 * values["width"]
        for row in range(values["first"], values["first"] + values["rows"]):
            found = tuple(self.read(int(part) + row * row_bytes) for part in parts)
            self.memory[values["out"].pointer + row * row_bytes] = hash(("sum", found))

    def _gather(self, values: Mapping[str, Any]) -> None:
        rank, share = values["rank"], values["rows"]
        for table, row_bytes in zip(self._table(values["tables"]), self._table(values["row_bytes"]), strict=True):
            for other in set(range(values["ranks"] if row_bytes else 0)) - {rank}:
                for row in range(other * share, (other + 1) * share):
                    source = int(table[other]) + row * int(row_bytes)
                    self.memory[int(table[rank]) + row * int(row_bytes)] = self.read(source)

    def _row_bytes(self, entry: str, values: Mapping[str, Any]) -> dict[str, int]:
        kernel = KERNELS[entry]
        numbers = {name: value for name, value in values.items() if isinstance(value, int)}
        each = kernel.params.row_bytes(kernel.names(self.sizes) | numbers)
        if entry == "norm_latents":
            each["packed"] = values["row_bytes"]
        return {name: size for name, size in each.items() if isinstance(values[name], Array)}

    def _run_rows(self, entry: str, values: Mapping[str, Any]) -> None:
        each = self._row_bytes(entry, values)
        shared = self._shared(entry, values, each)
        for row in range(values["rows"]):
            at = {name: values[name].pointer + row * size for name, size in each.items()}
            lost = set(SPLIT[entry]) - CHANGED
            found = hash((entry, shared, tuple(self.read(at[name]) for name in at if name not in lost)))
            for name in SPLIT[entry]:
                if name in at:
                    self.memory[at[name]] = hash((name, found))

    def _run_whole(self, entry: str, values: Mapping[str, Any]) -> None:
        """Every row of what it is given may depend on all of it, and may be written."""
        each, arrays = self._row_bytes(entry, values), {n: a for n, a in values.items() if isinstance(a, Array)}
        at = {name: self._addresses(array, each.get(name), values.get("rows", 1)) for name, array in arrays.items()}
        shared = self._shared(entry, values, arrays)
        read = tuple(self.read(address) for name in sorted(at) if name != "live" for address in at[name])
        for name in set(at) - {"live"}:
            for row, address in enumerate(at[name]):
                self.memory[address] = hash((entry, shared, name, row, read))

    def _addresses(self, array: Array, row_bytes: int | None, rows: int) -> list[int]:
        region = self.regions.get(array.pointer % self.stride)
        if row_bytes is None and region is not None and region.name.startswith("prefill.") and rows > 1:
            row_bytes, rows = region.bytes // region.shape[0], min(rows, region.shape[0])
        return [array.pointer + row * row_bytes for row in range(rows)] if row_bytes else [array.pointer]

    def _shared(self, entry: str, values: Mapping[str, Any], rows: Iterable[str]) -> tuple[Any, ...]:
        """What all rows have in common: numbers, and arrays that have no rows."""
        found: list[Any] = []
        for name, value in sorted(values.items()):
            if isinstance(value, Array) and name not in rows and name != "live":
                found.append((name, value.pointer % self.stride, self.read(value.pointer)))
            elif not isinstance(value, Array) and name != "rows":
                found.append((name, value))
        return tuple(found)

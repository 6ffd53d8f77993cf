"""Prefill with its rows divided among ranks: what a rank does to a row without the others, it does to its share alone.

Ranks have the same first projections, hyper-connections, router and index queries, so unsplit they all compute the same
of every row. Split, each computes its share of the rows: the streams with what mixes, expands and collapses them, the
latents, the router's logits, the index with its selection. Sums over ranks are then of the own rows only. What follows
needs all rows, such as the rank's own heads and experts: whatever is read there is gathered first, and nothing else is.

A row's result depends on its own input alone, so the split changes no bit. Decided here: the launches are those of a
pass that is not split; a table says which of them can be split and what they write, and the state of every array (its
rows are a rank's own, or all there) follows from the order of launches.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dsuf.cuda.arena import Arena, Array, Region, write_array
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.group import MAX_RANKS
from dsuf.cuda.launches import MIXES
from dsuf.cuda.prefill import SplitPass
from dsuf.cuda.ranks import SUMMED, RankedKernels, Values
from dsuf.cuda.streams import Sides
from dsuf.cuda.table import KERNELS
from dsuf.errors import DeviceError

SPLIT: Mapping[str, tuple[str, ...]] = {
    "embed_rows": ("streams", "pre"), "mean_streams": ("taps",), "gate_engram": ("out",),
    "project_streams": ("partial",), "mix_streams": ("pre", "post", "comb"),
    "collapse_norm": ("y", "codes", "scales", "meaning"), "expand_streams": ("out",),
    "expand_collapse": ("out", "y", "codes", "scales", "meaning"),
    "project_fp8_dim": ("out", "second"), "norm_latents": ("query", "codes", "scales", "key", "turned", "packed"),
    "project_bf16_few": ("out", "rounded"), "project_fp8_q_lora": ("out",),
    "index_queries": ("meaning", "weights"), "score_index": ("scores",), "mark_blocks": ("blocks", "inside"),
    "select_rows": ("selected",),
}  # fmt: skip
"""Entries that can be split, with the fields that they write."""

ONLY = {"project_fp8_dim": ("codes", "input.codes"), "project_fp8_q_lora": ("out", "index_q")}
"""Of entries that are split in one place only, the field and the array by which that is known."""

GROUPS = (
    ("query.codes", "query.scales", "fresh", "window_key"), ("router", "input.meaning"), ("selected",), ("input",),
    ("input.codes", "input.scales"), ("kv",), ("gate",), ("pooled",), ("key",), ("taps",), ("streams", "ffn.pre"),
)  # fmt: skip
"""Arrays that can be gathered; those of a group are needed at about the same time, and are gathered together."""

GATHERED = tuple(name for group in GROUPS for name in group)
END = len(GATHERED)
"""Behind the gathered arrays one without any bytes, to wait for everybody."""

SMALLEST_SHARE, SHARES = 16, 10
"""Rows of the smallest share (whole sixteens of bytes of every array); a share is this, twice this and so on."""


def plan_split() -> list[Region]:
    """The regions that a split prefill needs beside the others."""
    shapes = {
        "tables": ("i64", (END + 1, MAX_RANKS)),
        "row_bytes": ("i64", (END + 1,)),
        "live": ("i32", (SHARES, MAX_RANKS)),
    }
    return [Region(f"shares.{name}", kind, shape, "workspaces") for name, (kind, shape) in shapes.items()]


class RowSplit:
    """Divides the rows of passes of the prefill workspace in `arena` among the ranks of `ranked`."""

    def __init__(self, ranked: RankedKernels, arena: Arena, experts: int) -> None:
        """`experts` is how many routed experts a layer has: the router's logits lie that far apart."""
        self.ranked, self.arena = ranked, arena
        self.arrays = {name: arena[f"prefill.{name}"] for name in GATHERED}
        self.names = {array.pointer: name for name, array in self.arrays.items()}
        each = [array.bytes // array.shape[0] for array in self.arrays.values()]
        each[GATHERED.index("router")] = 4 * experts
        write_array(arena["shares.row_bytes"], np.array([*each, 0]))
        tables = np.zeros((END + 1, MAX_RANKS), np.int64)
        for place, array in enumerate(self.arrays.values()):
            tables[place, : arena.ranks] = [array.pointer + shift for shift in (0, *array.shifts)]
        write_array(arena["shares.tables"], tables)

    def share_of(self, rows: int) -> int:
        """Rows that each rank has of a pass of `rows` rows; 0 where it is not split."""
        share = rows // self.ranked.ranks
        size = share // SMALLEST_SHARE
        fits = self.ranked.ranks > 1 and share * self.ranked.ranks == rows and size * SMALLEST_SHARE == share
        return share if fits and 0 < size < 1 << SHARES and size & (size - 1) == 0 else 0

    def live_of(self, share: int) -> Array:
        """How many rows live, of each rank's share of this size."""
        return self.arena["shares.live"][(share // SMALLEST_SHARE).bit_length() - 1]

    def put_live(self, rows: int, stream: int) -> None:
        """Say how many rows the next pass has: how many that leaves each rank, for every size of a share."""
        shares = SMALLEST_SHARE << np.arange(SHARES)[:, None]
        write_array(self.arena["shares.live"], np.clip(rows - shares * np.arange(MAX_RANKS), 0, shares), stream)

    def begin(self, rows: int) -> "SplitKernels | None":
        """What launches a pass of `rows` rows; None where it is not split."""
        share = self.share_of(rows)
        return SplitKernels(self, share) if share else None

    def beside(self, sides: Sides | None) -> Sides | None:
        """The side streams of a split pass."""
        return MixesBeside(sides) if sides is not None else None


class MixesBeside(Sides):
    """Side streams for what never waits for other ranks, a site's mixes; the rest stays on the main one."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides

    def fork(self, main: int, number: int) -> int:
        """As `Sides.fork`."""
        return self._sides.fork(main, number) if number == MIXES else main

    def join(self, main: int, number: int) -> None:
        """As `Sides.join`."""
        if number == MIXES:
            self._sides.join(main, number)

    def close(self) -> None:
        """They are another's."""


class SplitKernels(SplitPass):
    """The launches of one pass, each for all rows or for every rank's share of them."""

    def __init__(self, split: RowSplit, share: int) -> None:
        self.split, self.share, self.ranked, self.names = split, share, split.ranked, split.ranked.names
        self._own: dict[int, str] = {}  # arrays of whose rows a rank has its own alone, by address; their names or ""
        self._read: set[str] = set()  # arrays that others may still be reading here

    def launch(self, entry: str, stream: int = 0, **values: DeviceArray | int | float | None) -> None:
        """As `Kernels.launch`."""
        try:
            self._launch(entry, stream, values)
        finally:
            self.ranked.settle()

    def finish(self, stream: int, *names: str) -> None:
        """Gather `names` where need be, and let nobody write what another still reads."""
        try:
            self._gather(stream, [name for name in names if self.split.arrays[name].pointer in self._own])
            self._wait(stream)
        finally:
            self.ranked.settle()

    def _launch(self, entry: str, stream: int, values: Values) -> None:
        written = [values[field] for field in SPLIT.get(entry, ())]
        outputs = {value.pointer for value in written if isinstance(value, Array)}
        if not self._read.isdisjoint(self.split.names.get(pointer, "") for pointer in outputs):
            self._wait(stream)
        if entry in SPLIT and self._is_split(entry, values):
            self._launch_shares(entry, stream, values)
            self._own |= {pointer: self.split.names.get(pointer, "") for pointer in outputs}
            return
        self._gather(stream, self._needed(entry, values, outputs))
        if entry in SUMMED:
            self._read.clear()
            self.ranked.sum_up(entry, stream, values, self.share)
            assert isinstance(values["out"], Array)
            self._own[values["out"].pointer] = ""
            return
        self.ranked.launch_all(entry, stream, values)
        for pointer in outputs:
            self._own.pop(pointer, None)

    def _is_split(self, entry: str, values: Values) -> bool:
        field, name = ONLY.get(entry, ("", ""))
        value = values.get(field)
        return not name or (isinstance(value, Array) and value.pointer == self.split.arena[f"prefill.{name}"].pointer)

    def _needed(self, entry: str, values: Values, outputs: Iterable[int]) -> list[str]:
        """What a launch over all rows reads of arrays of which a rank has its own rows alone."""
        unread = {*outputs, _pointer(values["out"])} if entry in SUMMED else set(outputs)
        read = {_pointer(value) for value in values.values() if isinstance(value, Array)} - unread
        found = [self._own[pointer] for pointer in read if pointer in self._own]
        if "" in found:
            raise DeviceError(f"{entry} reads all rows of what the ranks have a share of each")
        return found

    def _gather(self, stream: int, names: Iterable[str]) -> None:
        """Bring the rows of `names` together, and of what is needed soon after."""
        wanted = {name for group in GROUPS if not set(group).isdisjoint(names) for name in group}
        places = [i for i, name in enumerate(GATHERED) if name in wanted and self._pointer_of(name) in self._own]
        if not places:
            return
        self.ranked.announce(stream)
        for first, stop in _runs(places):
            self._launch_gather(stream, first, stop)
        for place in places:
            del self._own[self._pointer_of(GATHERED[place])]
        self._read = {GATHERED[place] for place in places}

    def _wait(self, stream: int) -> None:
        """Go on only when every rank has come here."""
        self.ranked.announce(stream)
        self._launch_gather(stream, END, END + 1)
        self._read = set()

    def _launch_gather(self, stream: int, first: int, stop: int) -> None:
        arena, sizes = self.split.arena, {"rows": self.share, "count": stop - first, "ranks": self.ranked.ranks}
        own: dict[str, Any] = {name: arena[f"shares.{name}"].rows(first, stop) for name in ("tables", "row_bytes")}
        for rank in range(self.ranked.ranks):
            values = {**self.ranked.met(stream), **own, **sizes, "rank": rank}
            self.ranked.launch_each("gather_rows", stream, values, (rank,))

    def _launch_shares(self, entry: str, stream: int, values: Values) -> None:
        """Queue `entry` on every rank for its own rows."""
        kernel, share = KERNELS[entry], self.share
        sizes = kernel.names(self.names) | {name: value for name, value in values.items() if isinstance(value, int)}
        each = kernel.params.row_bytes(sizes)
        if entry == "norm_latents":  # packed rows lie row to row, however long those of the store are
            each["packed"] = sizes["row_bytes"]
        for rank in range(self.ranked.ranks):
            own = {
                name: _skip(value, rank * share * each[name]) if name in each and isinstance(value, Array) else value
                for name, value in values.items()
            }
            live = self.split.live_of(share).rows(rank, rank + 1)
            self.ranked.launch_each(entry, stream, {**own, "live": live, "rows": share}, (rank,))

    def _pointer_of(self, name: str) -> int:
        return self.split.arrays[name].pointer


def _pointer(value: object) -> int:
    assert isinstance(value, Array)
    return value.pointer


def _skip(array: Array, size: int) -> Array:
    """What of `array` is behind its first `size` bytes, as one row of its elements."""
    item = array.bytes // max(1, int(np.prod(array.shape)))
    return Array(array.pointer + size, array.kind, ((array.bytes - size) // item,), array.shifts)


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """First and stop of each run of neighbours in ascending `places`; pure."""
    first = last = places[0]
    for place in places[1:]:
        if place != last + 1:
            yield first, last + 1
            first = place
        last = place
    yield first, last + 1

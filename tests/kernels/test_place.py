"""place_rows and keep_ids against the reference's window slots, page arithmetic and Engram history."""

import numpy as np
import pytest

from dsuf.checkpoint.engram import EngramHash
from dsuf.reference.sparse import window_slots
from tests.kernels.gpu import Gpu
from tests.kernels.test_compress import pool

VOCABULARY, PAD, PAGE_TOKENS, TURNS = 50, 3, 16, 3


class Turns:
    """Some turns' ids, floors and page tables, and how the kernel sees them."""

    def __init__(self, gpu: Gpu, rng: np.random.Generator, length: int) -> None:
        self.window, self.ring = gpu.sizes.window, 2 * gpu.sizes.window
        self.ids = rng.integers(0, VOCABULARY, (TURNS, length))
        self.ids[1, ::7] = -1
        pages = length // PAGE_TOKENS - 2  # the last positions have none
        self.table = rng.permutation(TURNS * pages).reshape(TURNS, pages).astype(np.int32)
        self.floors = rng.integers(0, length // 2, (TURNS, 4)).astype(np.int32)
        self.floors[0] = 0
        self.engram_ids = rng.integers(0, 40, VOCABULARY).astype(np.int32)

    def ring_ids(self, starts: list[int]) -> np.ndarray:
        """The rings of ids after `starts[slot]` positions each; what was never written is nonsense."""
        rings = np.full((TURNS, self.ring), 7, np.int32)
        for slot, start in enumerate(starts):
            kept = np.arange(max(0, start - self.ring), start)
            rings[slot, kept % self.ring] = self.ids[slot, kept]
        return rings

    def rows(self, parts: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
        """Slots, positions and ids of parts (slot, start, stop)."""
        slots = np.concatenate([np.full(stop - start, slot) for slot, start, stop in parts])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
        ids = np.concatenate([self.ids[slot, start:stop] for slot, start, stop in parts])
        names = ("row_slot", "row_position", "row_id")
        return {n: v.astype(np.int32) for n, v in zip(names, (slots, positions, ids), strict=True)}

    def place(self, gpu: Gpu, parts: list[tuple[int, int, int]], *, fresh: int = 0, halves: int = 4) -> dict:
        """What the kernel says of `parts`, with three rows of padding."""
        rows = self.rows(parts)
        live = len(rows["row_slot"])
        rows = {name: np.append(value, np.array([0, 5, 9], np.int32)) for name, value in rows.items()}
        count, starts = live + 3, [0] * TURNS
        for slot, start, _ in parts:
            starts[slot] = start
        out = {
            "positions": ("i64", (count,)), "group_positions": ("i64", (count,)), "ring_place": ("i64", (count,)),
            "entry_place": ("i64", (2, count)), "reachable": ("i32", (2, count)), "keep": ("i64", (count,)),
            "partner": ("i64", (count,)), "history": ("i64", (count, gpu.sizes.engram_shifts)),
            "windows": ("i32", (3, count, self.window)),
        }  # fmt: skip
        return gpu.run(
            "place_rows", out, **rows, ids=self.ring_ids(starts), table=self.table, floors=self.floors,
            engram_ids=self.engram_ids, live=live, rows=count, turns=TURNS, ring=self.ring,
            table_pages=self.table.shape[1], page_tokens=PAGE_TOKENS, halves=halves, pad_id=PAD, fresh=fresh,
        )  # fmt: skip


PARTS = [
    [(0, 0, 1)],
    [(2, 0, 40), (0, 3, 4)],
    [(1, 30, 36), (0, 127, 133), (2, 9, 15)],
    [(2, 5, 305)],
    [(0, 12, 130), (1, 0, 2)],
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("fresh", [0, 1])
def test_places(gpu: Gpu, rng: np.random.Generator, parts: list[tuple[int, int, int]], fresh: int) -> None:
    """Rings, pages of both ratios, reach and windows, row by row."""
    turns = Turns(gpu, rng, 320)
    rows, found = turns.rows(parts), turns.place(gpu, parts, fresh=fresh)
    slots, positions = rows["row_slot"].astype(np.int64), rows["row_position"].astype(np.int64)
    live = len(slots)
    np.testing.assert_array_equal(found["positions"][:live], positions)
    np.testing.assert_array_equal(found["group_positions"][:live], positions // 2 * 2)
    ring_place = slots * turns.ring + positions % turns.ring
    last = {place: row for row, place in enumerate(ring_place.tolist())}
    kept = np.array([last[place] == row for row, place in enumerate(ring_place.tolist())])
    np.testing.assert_array_equal(found["ring_place"][:live], np.where(kept, ring_place, -1))
    for ratio in (1, 2):
        entry, page_rows = positions // ratio, PAGE_TOKENS // ratio
        page = entry // page_rows
        has = (page < turns.table.shape[1]) & ((positions + 1) % ratio == 0)
        place = turns.table[slots, np.minimum(page, turns.table.shape[1] - 1)] * page_rows + entry % page_rows
        np.testing.assert_array_equal(found["entry_place"][ratio - 1, :live], np.where(has, place, -1))
        np.testing.assert_array_equal(found["reachable"][ratio - 1, :live], (positions + 1) // ratio)
    for row in range(live):
        slot, start = int(slots[row]), next(start for s, start, _ in parts if s == slots[row])
        for kind in range(3):
            floor = max(int(turns.floors[slot, kind]), 0)
            at = window_slots(positions[row : row + 1], 0, floor, turns.window)[0]
            own = np.where(
                fresh * (at >= start), -2 - (row - (positions[row] - at)), slot * turns.ring + at % turns.ring
            )
            np.testing.assert_array_equal(found["windows"][kind, row], np.where(at < 0, -1, own))
    for name in ("ring_place", "keep", "partner"):
        assert (found[name][live:] == -1).all()
    assert (found["entry_place"][:, live:] == -1).all()
    assert (found["windows"][:, live:] == -1).all()
    assert not found["reachable"][:, live:].any()


@pytest.mark.parametrize("parts", PARTS)
def test_history(gpu: Gpu, rng: np.random.Generator, parts: list[tuple[int, int, int]]) -> None:
    """The reference's history over whole sequences, pictures included."""
    turns = Turns(gpu, rng, 320)
    rows, found = turns.rows(parts), turns.place(gpu, parts)
    shifts = gpu.sizes.engram_shifts
    padded = np.append(turns.engram_ids, PAD).astype(np.int64)
    whole = EngramHash(padded, VOCABULARY, np.ones((1, shifts), np.int64), np.ones((1, shifts - 1, 1), np.int64))
    for row, (slot, position) in enumerate(zip(rows["row_slot"], rows["row_position"], strict=True)):
        expected = whole.history(turns.ids[slot], alive=turns.ids[slot] >= 0)[position]
        np.testing.assert_array_equal(found["history"][row], expected)
    assert (found["history"][-3:] == PAD).all()


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 1, 36], [5, 35], [7, 2, 1, 30], [1, 20, 19], [9, 13, 18]])
@pytest.mark.parametrize("halves", [2, 3, 4])
def test_halves_over_chunks(gpu: Gpu, rng: np.random.Generator, sizes: list[int], halves: int) -> None:
    """Groups pooled over any division of a prompt are those of the whole prompt; other turns' halves stay."""
    turns, dim = Turns(gpu, rng, 320), gpu.sizes.head_dim
    kv, gate = rng.standard_normal((2, 40, dim), np.float32)
    store, start, pooled = np.full((TURNS * halves, 2, dim), np.nan, np.float32), 0, []
    for size in sizes:
        part = slice(start, start + size)
        placed = turns.place(gpu, [(1, start, start + size)], halves=halves)
        found = gpu.run(
            "compress_rows", {"pooled": ("bf16", (size, dim)), "halves": store}, kv=kv[part], gate=gate[part],
            keep=placed["keep"][:size], partner=placed["partner"][:size], live=size, rows=size,
        )  # fmt: skip
        store, start = found["halves"], start + size
        pooled.append(found["pooled"])
    whole = gpu.run(
        "compress_rows", {"pooled": ("bf16", (40, dim)), "halves": store}, kv=kv, gate=gate, live=40, rows=40,
        keep=np.full(40, -1), partner=np.where(np.arange(40) % 2, np.arange(40) - 1, -1),
    )["pooled"]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(pooled), whole)
    assert (pool(kv[0], kv[1], gate[0], gate[1]) != 0).any()
    assert np.isnan(store[:halves]).all()
    assert np.isnan(store[2 * halves :]).all()


@pytest.mark.parametrize("size", [1, 6, 300])
def test_ids_are_kept(gpu: Gpu, rng: np.random.Generator, size: int) -> None:
    """The ring has the last ids by position; other turns' rings and padding rows leave no trace."""
    turns = Turns(gpu, rng, 320)
    before = turns.ring_ids([0, 11, 5])
    rows = turns.rows([(2, 5, 5 + size)])
    padded = {name: np.append(value, np.int32(1)) for name, value in rows.items()}
    found = gpu.run("keep_ids", {"ids": before}, **padded, live=size, rows=size + 1, turns=TURNS, ring=turns.ring)[
        "ids"
    ]
    np.testing.assert_array_equal(found, turns.ring_ids([0, 11, 5 + size]))

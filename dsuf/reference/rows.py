"""Stores of cache rows: by index for what is kept for the whole context, rings for what only a window needs.

A store keeps rows packed, as a session's cache moves between places; `read` gives the values the bytes mean. Without
quantisers (`fp32`) a row is its float32 values.
"""

from typing import Protocol

import numpy as np

from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic, Bytes
from dsuf.reference.quant import FP4_ENTRY, FP4_INDEX, FP8, Quantiser


class RowFormat(Protocol):
    """How a row of values becomes bytes."""

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values."""

    def pack(self, x: F32) -> Bytes:
        """Rows [rows, width] as bytes [rows, row_bytes]."""

    def unpack(self, rows: Bytes) -> F32:
        """The values of packed rows."""


class PlainFormat:
    """Float32 values as they are."""

    def row_bytes(self, width: int) -> int:
        """Four bytes a value."""
        return 4 * width

    def pack(self, x: F32) -> Bytes:
        """A view of the values as bytes."""
        return np.ascontiguousarray(x).view(np.uint8)

    def unpack(self, rows: Bytes) -> F32:
        """A view of the bytes as values."""
        return np.ascontiguousarray(rows).view(np.float32)


PLAIN = PlainFormat()


class RowFormats:
    """The formats of the three kinds of cache rows under an arithmetic."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        def pick(quantiser: Quantiser) -> RowFormat:
            return quantiser if arithmetic.quantises else PLAIN

        self.window, self.entry, self.index_key = pick(FP8), pick(FP4_ENTRY), pick(FP4_INDEX)


class PackedRows(Protocol):
    """Packed rows by index; which of them were ever written is for the caller to know."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows of one sequence alone."""

    def get(self, rows: slice | I64) -> Bytes:
        """A copy or a view of `rows` [n, row_bytes]; a slice begins at its start and has no step."""

    def put(self, start: int, packed: Bytes) -> None:
        """Put `packed` [n, row_bytes] at `start` and after."""


class GrowingRows:
    """Rows of a sequence that stands for itself, in an array that grows as they are written."""

    def __init__(self, row_bytes: int) -> None:
        self._rows: Bytes = np.empty((0, row_bytes), np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self._rows.nbytes

    def get(self, rows: slice | I64) -> Bytes:
        """A view for a slice, else a copy."""
        return self._rows[rows]

    def put(self, start: int, packed: Bytes) -> None:
        """Put `packed` at `start` and after."""
        stop = start + len(packed)
        if stop > len(self._rows):
            grown = np.empty((max(stop, 2 * len(self._rows), 64), self._rows.shape[1]), np.uint8)
            grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:stop] = packed


class RowStore:
    """Rows of a global cache by index; rows past the valid count are rewritten, never read.

    A `mirrored` store, one that every step reads from its start, keeps the values of its first rows beside the bytes.
    """

    MIRRORED_ROWS = 8192

    def __init__(self, width: int, row_format: RowFormat, packed: PackedRows, *, mirrored: bool = False) -> None:
        self.width, self.format, self.packed = width, row_format, packed
        self.mirror: F64 = np.empty((0, width))
        self._mirrored, self._known = mirrored, 0

    def write(self, start: int, rows: F32) -> None:
        """Put `rows` [n, width] at `start` and after."""
        self.packed.put(start, self.format.pack(rows))
        self._known = min(self._known, start)

    def first(self, count: int) -> F64:
        """The values of the first `count` rows, float64 [count, width]; not to be written to."""
        if not self._mirrored or count > self.MIRRORED_ROWS:
            return self.read(slice(count))
        if count > len(self.mirror):
            grown = np.empty((min(self.MIRRORED_ROWS, max(2 * count, 64)), self.width))
            grown[: self._known] = self.mirror[: self._known]
            self.mirror = grown
        if count > self._known:
            self.mirror[self._known : count] = self.read(slice(self._known, count))
            self._known = count
        return self.mirror[:count]

    def read(self, rows: slice | I64) -> F64:
        """The values of `rows`, float64 [n, width]."""
        return self.format.unpack(self.packed.get(rows)).astype(np.float64)

    def held_bytes(self) -> int:
        """Bytes allocated for this sequence alone."""
        return self.packed.nbytes + self.mirror.nbytes


class RowRing:
    """Rows by position, of which the last `size` are kept.

    `size` exceeds the window by what a step may write and then take back, so that rejected rows never overwrite rows
    still in the window. `floor` is the first position that was ever written without a gap up to now: a replayed tail
    starts its windows there.
    """

    SLACK = 16

    def __init__(self, width: int, window: int, row_format: RowFormat) -> None:
        self.width, self.size, self.format = width, window + self.SLACK, row_format
        self.packed: Bytes = np.zeros((self.size, row_format.row_bytes(width)), np.uint8)
        self.floor = 0

    def write(self, start: int, rows: F32) -> None:
        """Put `rows` [n, width] at positions `start` and after; of more than `size` rows only the last stay."""
        first = max(0, len(rows) - self.size)
        slots = np.arange(start + first, start + len(rows)) % self.size
        self.packed[slots] = self.format.pack(rows[first:])

    def load(self, packed: Bytes, floor: int) -> None:
        """Replace everything by the bytes of all rows; raises `ValueError` if they are of another number."""
        self.packed = packed.reshape(self.packed.shape).copy()
        self.floor = floor

    def read(self, start: int, stop: int) -> F64:
        """The values at positions `start` to `stop` (exclusive), float64 [n, width]."""
        return self.format.unpack(self.packed[np.arange(start, stop) % self.size]).astype(np.float64)

"""Stores of cache rows: growing ones for what is kept for the whole context, rings for what only a window needs.

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


class RowStore:
    """Rows by index, growing as they are written; rows past the valid count are rewritten, never read.

    A `mirrored` store, one that every step reads from its start, keeps the values of its first rows beside the bytes.
    """

    MIRRORED_ROWS = 8192

    def __init__(self, width: int, row_format: RowFormat, *, mirrored: bool = False) -> None:
        self.width, self.format = width, row_format
        self.packed: Bytes = np.empty((0, row_format.row_bytes(width)), np.uint8)
        self.mirror: F64 = np.empty((0, width))
        self._mirrored, self._known = mirrored, 0

    def write(self, start: int, rows: F32) -> None:
        """Put `rows` [n, width] at `start` and after."""
        stop = start + len(rows)
        if stop > len(self.packed):
            grown = np.empty((max(stop, 2 * len(self.packed), 64), self.packed.shape[1]), np.uint8)
            grown[:start] = self.packed[:start]
            self.packed = grown
        self.packed[start:stop] = self.format.pack(rows)
        self._known = min(self._known, start)

    def load(self, packed: bytes, rows: int) -> None:
        """Replace everything by `rows` packed rows; raises `ValueError` if `packed` is of another size."""
        self.packed = np.frombuffer(packed, np.uint8).reshape(rows, self.packed.shape[1]).copy()
        self._known = 0

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
        return self.format.unpack(self.packed[rows]).astype(np.float64)


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

    def load(self, packed: bytes, floor: int) -> None:
        """Replace everything; raises `ValueError` if `packed` is of another size."""
        self.packed = np.frombuffer(packed, np.uint8).reshape(self.packed.shape).copy()
        self.floor = floor

    def read(self, start: int, stop: int) -> F64:
        """The values at positions `start` to `stop` (exclusive), float64 [n, width]."""
        return self.format.unpack(self.packed[np.arange(start, stop) % self.size]).astype(np.float64)

"""A turn's state as bytes: what its slot holds of a window's worth, by position, so that any slot can take it over.

    marks     floors of the four kinds of window, the last length at which a replay cut windows, the least length that
              it can be cut back to: int64
    windows   of every ring the rows of the last window + SLACK_TOKENS positions, oldest first
    halves    of every ratio-2 source the first halves of the last SLACK_TOKENS / 2 + 1 groups, oldest first: float32

An *image* is a slot as it lies on the device, with its places by position modulo the ring. Rows of positions before the
beginning are zero.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.caches import CacheSizes
from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.streams import handle_on
from dsuf.errors import CheckpointError

SLACK_TOKENS = 16
"""Of the last positions, how many a state can do without and still be one that the turn went through."""

NEAR_SHARE = 16
"""A state behind a replay can do without so small a part of the window."""

MARKS = 6
Bytes = NDArray[np.uint8]


class Image(NamedTuple):
    """A slot: rings [rings, ring rows, bytes], halves [sources, halves, 2 * head_dim], ids [ring rows], floors [4]."""

    rings: Bytes
    halves: NDArray[np.float32]
    ids: NDArray[np.int32]
    floors: NDArray[np.int32]
    length: NDArray[np.int32]  # [1]


class Marks(NamedTuple):
    """What a turn's host side must remember of its rows.

    `replayed` is the last length at which a replay cut windows, `least` the least length that the turn can be cut back
    to, since a slot that was filled from a state has the rows of the state alone.
    """

    replayed: int = 0
    least: int = 0

    def count_slack(self, length: int) -> int:
        """How many of the last of `length` positions can be taken back."""
        return max(0, min(SLACK_TOKENS, length - self.least))

    def count_spare(self, length: int) -> int:
        """How many, so that a state is left that the turn went through."""
        return max(0, min(self.count_slack(length), length - self.replayed))

    def count_near(self, length: int, replay_tokens: int) -> int:
        """How many at most where windows are replayed in any case, `replay_tokens` of them: few, since the first rows
        then find so many less in the windows."""
        return min(self.count_slack(length), -(-replay_tokens // NEAR_SHARE))


class StateShape:
    """Sizes of states and images of a model."""

    def __init__(self, sizes: CacheSizes) -> None:
        config = sizes.config
        self.positions, self.groups = config.window_size + SLACK_TOKENS, SLACK_TOKENS // 2 + 1
        self.rings, self.ring_rows, self.row_bytes = sizes.rings, sizes.ring_rows, sizes.window_bytes
        self.sources = tuple(layer for layer in config.kv_source_layers if config.ratio(layer) == 2)
        self.halves, self.half_width = sizes.halves, 2 * config.head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of a state; they do not depend on the length."""
        windows = self.rings * self.positions * self.row_bytes
        return 8 * MARKS + windows + len(self.sources) * self.groups * self.half_width * 4

    def view_image(self, memory: Bytes) -> Image:
        """An image laid over `memory`, of `image_bytes`."""
        parts, at = [], 0
        for kind, shape in self._parts():
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            parts.append(memory[at : at + size].view(kind).reshape(shape))
            at += size
        return Image(*parts)

    @property
    def image_bytes(self) -> int:
        """Bytes of an image."""
        return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in self._parts())

    def _parts(self) -> list[tuple[Any, tuple[int, ...]]]:
        return [
            (np.uint8, (self.rings, self.ring_rows, self.row_bytes)),
            (np.float32, (len(self.sources), self.halves, self.half_width)),
            (np.int32, (self.ring_rows,)),
            (np.int32, (4,)),
            (np.int32, (1,)),
        ]

    def pack(self, image: Image, length: int, marks: Marks) -> bytes:
        """The state of `image` behind `length` positions."""
        rows, groups = self._places(length)
        windows = np.where((rows >= 0)[:, None], image.rings[:, rows % self.ring_rows], np.uint8(0))
        halves = np.where((groups >= 0)[:, None], image.halves[:, groups % self.halves], np.float32(0))
        return b"".join([np.array([*image.floors, *marks], np.int64).tobytes(), windows.tobytes(), halves.tobytes()])

    def unpack(self, payload: bytes, ids: NDArray[np.int64], length: int, image: Image) -> Marks:
        """Lay the state `payload` behind the positions of `ids` into `image`, cut to `length`; the marks of that.

        Raises `CheckpointError` if the state is not of this model.
        """
        if len(payload) != self.state_bytes:
            raise CheckpointError(f"a state of {len(payload)} bytes does not fit this model, {self.state_bytes} do")
        marks = np.frombuffer(payload, np.int64, MARKS)
        rows, groups = self._places(len(ids))
        count = self.rings * self.positions * self.row_bytes
        windows = np.frombuffer(payload, np.uint8, count, 8 * MARKS)
        halves = np.frombuffer(payload, np.float32, offset=8 * MARKS + count)
        image.rings[:, rows % self.ring_rows] = windows.reshape(self.rings, self.positions, self.row_bytes)
        image.halves[:, groups % self.halves] = halves.reshape(len(self.sources), self.groups, self.half_width)
        self.put_ids(image, ids[:length])
        image.floors[:] = marks[:4]
        image.length[0] = length
        return Marks(int(marks[4]), max(int(marks[5]), len(ids) - SLACK_TOKENS))

    def put_ids(self, image: Image, ids: NDArray[np.int64]) -> None:
        """Lay the last of `ids`, tokens from position 0 on, into `image`."""
        positions = np.arange(max(0, len(ids) - self.ring_rows), len(ids))
        image.ids[positions % self.ring_rows] = ids[positions]

    def last_ids(self, image: Image, known: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Tokens of all `length` positions: the last out of `image`, those before from `known`.

        What a step wrote and took back lies where the oldest positions of the ring would be, so only half of it counts.
        """
        first = max(0, length - self.ring_rows // 2)
        positions = np.arange(first, length)
        return np.concatenate([known[:first], image.ids[positions % self.ring_rows].astype(np.int64)])

    def _places(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions and groups of a state behind `length` positions; negative: before the beginning."""
        newest = (length - 1) // 2
        return np.arange(length - self.positions, length), np.arange(newest - self.groups + 1, newest + 1)


class SlotCopier:
    """Queues copies between a slot and an image in pinned memory."""

    def __init__(self, arena: Arena, shape: StateShape) -> None:
        self.arena, self.shape = arena, shape

    def read(self, slot: int, memory: Array, stream: int) -> None:
        """Queue the copy of `slot`, the first rank's, into the image at `memory`."""
        at = memory.pointer
        for array in self._arrays(slot):
            call(driver.cuMemcpyDtoHAsync(at, array.pointer, array.bytes, stream))
            at += array.bytes

    def write(self, slot: int, memory: Array, stream: int) -> None:
        """Queue the copy of the image at `memory` into `slot`, every rank's."""
        at = memory.pointer
        for array in self._arrays(slot):
            for rank, shift in enumerate((0, *array.shifts)):
                call(driver.cuMemcpyHtoDAsync(array.pointer + shift, at, array.bytes, handle_on(stream, rank)))
            at += array.bytes

    def _arrays(self, slot: int) -> list[Array]:
        """The pieces of `slot` in the order of an image."""
        rings = [self.arena["windows"][ring][slot] for ring in range(self.shape.rings)]
        halves = [self.arena[f"layers.{layer}.halves"][slot] for layer in self.shape.sources]
        facts = [self.arena[f"turns.{name}"].rows(slot, slot + 1) for name in ("ids", "floors", "length")]
        return [*rings, *halves, *facts]


class ImagePool:
    """Pinned memory for images: as many as were ever in use at once."""

    def __init__(self, shape: StateShape) -> None:
        self.shape, self._all, self._idle = shape, list[Array](), list[Array]()

    def take(self) -> Array:
        """Memory for one image."""
        if not self._idle:
            size = self.shape.image_bytes
            self._all.append(Array(int(call(driver.cuMemHostAlloc(size, 0))), "u8", (size,)))
            self._idle.append(self._all[-1])
        return self._idle.pop()

    def give_back(self, memory: Array) -> None:
        """Nothing reads or writes `memory` any more."""
        self._idle.append(memory)

    def close(self) -> None:
        """Free all; none is in use."""
        for memory in self._all:
            call(driver.cuMemFreeHost(memory.pointer))
        self._all, self._idle = [], []

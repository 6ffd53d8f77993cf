"""The rows of one forward pass: some positions of some sequences, laid end to end."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsuf.reference.arithmetic import F64, I64, Bool
from dsuf.reference.cache import SequenceCache
from dsuf.reference.rope import Rope, Rotation


class Segment:
    """Positions `start` to `stop` of one sequence, at `rows` of the batch.

    During a pass it also carries what an index layer publishes to the layers after it: `entries` [n, head_dim], the
    `selection` [rows, k] of them (-1 is none), and the `candidates` [rows, entries] that Reindex layers choose from.
    """

    def __init__(self, cache: SequenceCache, start: int, stop: int) -> None:
        self.cache, self.start, self.stop = cache, start, stop
        self.rows = slice(0, stop - start)
        self.entries: F64 = np.empty((0, 0))
        self.selection: I64 = np.empty((stop - start, 0), np.int64)
        self.candidates: Bool | None = None

    @property
    def positions(self) -> I64:
        """Absolute positions [rows]."""
        return np.arange(self.start, self.stop)


class Batch:
    """Segments with their rows numbered through, and the rotations of those rows under both rotary tables."""

    def __init__(self, segments: Sequence[Segment], window_rope: Rope, compressed_rope: Rope) -> None:
        self.segments = tuple(segments)
        first = 0
        for segment in self.segments:
            segment.rows = slice(first, first + segment.stop - segment.start)
            first = segment.rows.stop
        self.positions: I64 = np.concatenate([segment.positions for segment in self.segments])
        self._rotations = {False: window_rope.rotation(self.positions), True: compressed_rope.rotation(self.positions)}

    def rotation(self, *, compressed: bool) -> Rotation:
        """The rotation of every row, by the table of layers with or without compressed KV."""
        return self._rotations[compressed]


class Observer(Protocol):
    """Looks at what a pass computes, and may force its discrete choices; the comparison with recorded runs is one."""

    def see(self, name: str, value: NDArray[np.generic]) -> None:
        """Called with intermediate results by name, such as `layers.3.attn_out`."""

    def force(self, name: str) -> NDArray[np.generic] | None:
        """A choice to use in place of the computed one (`router_indices`, `index_topk`), or None."""


class NoObserver:
    """Sees nothing, forces nothing."""

    def see(self, name: str, value: NDArray[np.generic]) -> None:
        """Ignore."""

    def force(self, name: str) -> NDArray[np.generic] | None:
        """Nothing is forced."""


class ForcedChoices:
    """Forces the choices in `choices` by name and keeps what it sees in `seen`."""

    def __init__(self, choices: Mapping[str, NDArray[np.generic]]) -> None:
        self.choices = choices
        self.seen: dict[str, NDArray[np.generic]] = {}

    def see(self, name: str, value: NDArray[np.generic]) -> None:
        """Keep `value`."""
        self.seen[name] = value

    def force(self, name: str) -> NDArray[np.generic] | None:
        """The choice given under `name`, if any."""
        return self.choices.get(name)


NO_OBSERVER = NoObserver()

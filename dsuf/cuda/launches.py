"""A pass: launches over the rows of one pipeline, queued on its stream or captured into a graph."""

from collections.abc import Mapping
from copy import copy
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import Array, write_array
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.kernels import Kernels
from dsuf.cuda.streams import Sides
from dsuf.cuda.turns import Turns
from dsuf.cuda.workspace import Workspace

MIXES, BRANCH = 0, 1
"""Side streams: a site's mixes, which its expansion waits for; a part of the branch beside the rest of it."""


class Observer(Protocol):
    """Looks at what a pass computes, and may force its discrete choices; a pass with one is never captured."""

    def see(self, name: str, array: Array) -> None:
        """Called with results by name, such as `layers.3.attn_out`; what `array` holds is overwritten later."""

    def force(self, name: str) -> NDArray[np.generic] | None:
        """A choice to use in place of the computed one, or None."""


class Pass:
    """Launches for up to `rows` rows, of which the device knows how many live.

    `entries` bounds, by ratio, how many compressed entries a turn of this pass can have (multiples of 8). Rows of a
    pass with `fresh` read each other's window rows beside the rings, so that there may be more of them than a ring has
    to spare. `turns` is what the slots hold of their turns, by name. With `sides` a part of the launches can run beside
    the others.
    """

    def __init__(
        self, kernels: Kernels, stream: int, work: Workspace, turns: Turns, rows: int, entries: Mapping[int, int], *,
        fresh: bool, observer: Observer | None = None, sides: Sides | None = None,
    ) -> None:  # fmt: skip
        # An observer looks at arrays as soon as their launch is queued, which asks for one stream.
        self.sides = None if observer is not None else sides
        self.kernels, self.stream, self.work, self.turns = kernels, stream, work, turns
        self.rows, self.entries, self.fresh, self.observer = rows, entries, fresh, observer

    def launch(self, entry: str, **values: DeviceArray | int | float | None) -> None:
        """Queue `entry` over the rows of the pass."""
        self.kernels.launch(entry, self.stream, **{"live": self.work["live"], "rows": self.rows, **values})

    def launch_plain(self, entry: str, **values: DeviceArray | int | float | None) -> None:
        """Queue `entry` with the fields that are given and no others."""
        self.kernels.launch(entry, self.stream, **values)

    def beside(self, number: int) -> "Pass":
        """The same pass on side stream `number`, from here on until `join`; the pass itself where there are none."""
        if self.sides is None:
            return self
        part = copy(self)
        part.stream = self.sides.fork(self.stream, number)
        return part

    def join(self, number: int) -> None:
        """Go on only behind what was queued on side stream `number`."""
        if self.sides is not None:
            self.sides.join(self.stream, number)

    def quantize(self, name: str, width: int, *, rows: int | None = None, live: Array | None = None) -> None:
        """Put activation `name` into FP8 form, beside it."""
        self.launch_plain(
            "quantize_fp8", x=self.work[name], **self.work.quantised(name), meaning=None, place=None,
            live=live or self.work["live"], codes_stride=width, scales_stride=width // 32,
            rows=self.rows if rows is None else rows, width=width,
        )  # fmt: skip

    def see(self, name: str, array: Array) -> None:
        """Show the observer, if there is one, `array`."""
        if self.observer is not None:
            self.observer.see(name, array)

    def force(self, name: str, array: Array) -> None:
        """Show a choice, and exchange it for what the observer forces, if anything."""
        if self.observer is not None:
            self.observer.see(name, array)
            forced = self.observer.force(name)
            if forced is not None:
                write_array(array, forced, self.stream)

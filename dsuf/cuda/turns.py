"""What the device knows of each attached turn, an array a fact with an element a slot; kernels read and advance it.

`table` names the pages of a turn, `write_table` those of them that it may write: pages that were there before it stay
as they are, even where it computes their positions again.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region, write_array
from dsuf.cuda.caches import CacheSizes
from dsuf.types import Sampling

ENCODER, BOUNDARY, DECODER, DRAFT = range(4)
"""Windows that may begin later than the turn, in the order of `floors`."""


def plan_turns(config: ModelConfig, sizes: CacheSizes) -> list[Region]:
    """The regions of all facts."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "length": ("i32", ()),
        "anchor": ("i32", ()),
        "generated": ("i32", ()),
        "max_tokens": ("i32", ()),
        "done": ("i32", ()),
        "temperature": ("f64", ()),
        "top_p": ("f64", ()),
        "seed": ("i64", ()),
        "logprobs": ("i32", ()),
        "floors": ("i32", (4,)),
        "ids": ("i32", (sizes.ring_rows,)),
        "table": ("i32", (sizes.table_pages,)),
        "write_table": ("i32", (sizes.table_pages,)),
    }
    return [Region(f"turns.{name}", kind, (sizes.slots, *shape), "slots") for name, (kind, shape) in shapes.items()]


class Turns:
    """The facts by name, and what the host writes of them; writes take effect in the order of `stream`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __getitem__(self, name: str) -> Array:
        return self._arena[f"turns.{name}"]

    def begin(self, slot: int, sampling: Sampling, pages: Sequence[int], stream: int) -> None:
        """Put a new turn without positions into `slot`."""
        table = self.fill_table(pages)
        facts = {
            "length": 0, "anchor": -1, "generated": 0, "max_tokens": sampling.max_tokens, "done": 0,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
            "seed": np.uint64(sampling.seed % 2**64).view(np.int64),
            "logprobs": -1 if sampling.logprobs is None else sampling.logprobs, "floors": np.zeros(4), "table": table,
            "write_table": table,
        }  # fmt: skip
        for name, value in facts.items():
            self.write(name, slot, value, stream)

    def fill_table(self, pages: Sequence[int], kept: int = 0) -> NDArray[np.int64]:
        """A row of a table of `pages`, as many as it holds; the first `kept` of them are left out."""
        table = np.full(self["table"].shape[1], -1)
        held = pages[: len(table)]
        table[kept : len(held)] = held[kept:]
        return table

    def write(self, name: str, slot: int, value: object, stream: int) -> None:
        """Set one fact of one slot."""
        write_array(self[name].rows(slot, slot + 1), np.asarray(value), stream)

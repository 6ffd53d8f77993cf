"""What the device knows of each attached turn, an array a fact with an element a slot; kernels read and advance it."""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region, write_array
from dsuf.cuda.caches import CacheSizes
from dsuf.types import Sampling

ENCODER, BOUNDARY, DECODER, DRAFT = range(4)
"""Windows that may begin later than the turn, in the order of `floors`."""

NOT_RUNNING = 3
"""The mark `done` of a slot without a turn."""


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
        "floors": ("i32", (4,)),
        "ids": ("i32", (sizes.ring_rows,)),
        "table": ("i32", (sizes.table_pages,)),
    }
    return [Region(f"turns.{name}", kind, (sizes.slots, *shape), "slots") for name, (kind, shape) in shapes.items()]


class Turns:
    """The facts by name, and what the host writes of them; writes take effect in the order of `stream`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __getitem__(self, name: str) -> Array:
        return self._arena[f"turns.{name}"]

    def begin(self, slot: int, sampling: Sampling, pages: tuple[int, ...], stream: int) -> None:
        """Put a new turn without positions into `slot`."""
        table = np.full(self["table"].shape[1], -1)
        table[: len(pages)] = pages
        facts = {
            "length": 0, "anchor": -1, "generated": 0, "max_tokens": sampling.max_tokens, "done": 0,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
            "seed": np.uint64(sampling.seed % 2**64).view(np.int64), "floors": np.zeros(4), "table": table,
        }  # fmt: skip
        for name, value in facts.items():
            self.write(name, slot, value, stream)

    def write(self, name: str, slot: int, value: object, stream: int) -> None:
        """Set one fact of one slot."""
        write_array(self[name].rows(slot, slot + 1), np.asarray(value), stream)

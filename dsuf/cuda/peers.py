"""The memory in which ranks meet on one stream: what each shows the others, where all have it, who has arrived.

Its regions are planned as any others, and lie at the same places in every rank's arena.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region, view_host, write_array
from dsuf.cuda.group import MAX_RANKS

CHOSEN = ("decode.picked", "draft.picked", "prefill.picked", "step.kept", "step.next")
"""The regions of what the first rank chooses and the others take over: the fields that `ranks` calls choices."""

ALIGNMENT_BYTES = 256


def plan_peers(own: ModelConfig, number: int, rows: int, ranks: int) -> list[Region]:
    """The regions of meeting number `number` of one of `ranks` ranks with sizes `own`: up to `rows` rows are shown."""
    width_bytes = -(-(own.hc_mult + 1) * own.dim * 2 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "parts": ("u8", (2, rows * width_bytes)),
        "slices": ("f32", (rows, own.vocab_size // ranks)),
        "arrived": ("i32", (MAX_RANKS,)),
        "epoch": ("i32", (1,)),
        "counter": ("i32", (1,)),
        "words": ("i64", (MAX_RANKS,)),
        "partials": ("i64", (3, MAX_RANKS)),
        "chosen": ("i64", (len(CHOSEN), 1)),
    }
    regions = [Region(f"peers.{number}.{name}", kind, shape, "workspaces") for name, (kind, shape) in shapes.items()]
    return [*regions, Region(f"peers.{number}.missing", "i32", (1,), "workspaces", pinned=True)]


class Peers:
    """The arrays with which the ranks meet on one stream; two parts take turns."""

    def __init__(self, arena: Arena, number: int) -> None:
        names = ("parts", "slices", "arrived", "epoch", "counter", "missing", "words", "partials", "chosen")
        self._arrays = {name: arena[f"peers.{number}.{name}"] for name in names}
        self._turn, self._leaders = 0, [arena[name].pointer for name in CHOSEN]
        self.missing = [view_host(self["missing"].on(rank)) for rank in range(arena.ranks)]
        shown = [self["parts"][0], self["parts"][1], self["slices"]]
        write_array(self["partials"], np.array([_addresses(array) for array in shown]))
        write_array(self["words"], np.array(_addresses(self["arrived"])))
        write_array(self["chosen"], np.array(self._leaders).reshape(-1, 1))

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def next_part(self, rows: int, width: int) -> tuple[Array, Array]:
        """Where the next sum's parts go, BF16 [rows, width], and the table of their addresses."""
        self._turn = 1 - self._turn
        return self["parts"][self._turn].viewed("bf16", rows, width), self["partials"][self._turn]

    def find_leader(self, choice: Array) -> Array:
        """The address, as the kernels read it, of what the first rank has at `choice`."""
        return self["chosen"][self._leaders.index(choice.pointer)]


def _addresses(array: Array) -> list[int]:
    """Where each rank has `array`, in a row of fixed length."""
    found = [array.pointer + shift for shift in (0, *array.shifts)]
    return found + [0] * (MAX_RANKS - len(found))

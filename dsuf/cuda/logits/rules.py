"""What the host rules out of a step's tokens: a question when the drafts are there, the answer before a choice is made.

The drafts of a step are made on the device, and the step may have been launched long before: so the device says what
they are, the layers run while the host finds the masks (`answers`), and only behind the logits a kernel waits for them.
Questions and masks lie in pinned memory. Where several ranks work together the first alone asks: its choice is theirs.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region, write_array
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.launches import Pass

QUESTION_HEAD = 3
"""Numbers of a turn's question before its last tokens: slot, length, drafts that are verified."""

PATIENCE_US = 20_000_000
"""How long a step waits for its masks before it goes on without, and the engine fails."""


def plan_rules(pipeline: str, config: ModelConfig, batch: int) -> list[Region]:
    """The regions of a pipeline's questions and masks, for steps of up to `batch` turns."""
    block = config.dspark_block_size
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "questions": ("i32", (batch + 1, QUESTION_HEAD + 2 * block + 1)),
        "asked": ("i64", (1,)),
        "masks": ("i32", (batch, block + 1, -(-config.vocab_size // 128) * 4)),  # in whole sixteens of bytes
        "masked": ("i32", (batch, block + 1)),
        "answered": ("i64", (1,)),
        "late": ("i32", (1,)),
    }
    pinned = [Region(f"{pipeline}.{name}", kind, shape, "masks", pinned=True) for name, (kind, shape) in shapes.items()]
    return [*pinned, Region(f"{pipeline}.ruled", "i32", (1,), "workspaces")]


class Rules:
    """Queues a pipeline's questions, and the masks that answer them; a step without rules passes by both."""

    def __init__(self, arena: Arena, pipeline: str) -> None:
        names = ("questions", "asked", "masks", "masked", "answered", "late", "ruled", "step")
        self._arrays = {name: arena[f"{pipeline}.{name}"] for name in names}

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def set(self, turns: int, stream: int) -> None:
        """Say, behind what is queued on `stream`, how many turns of the next step keep to a constraint."""
        write_array(self["ruled"].on(0), np.array([turns]), stream)

    def ask(self, todo: Pass, ring: int, **values: DeviceArray | int | None) -> None:
        """Queue the question of a step: `turn`, `drafts`, `verified`, `live` and `batch` as the launch names them."""
        own = {name: self[name] for name in ("ruled", "questions", "asked", "step")}
        facts = {name: todo.turns[name] for name in ("length", "anchor", "ids")}
        todo.launch_plain("ask_masks", **own, **facts, **values, turns=todo.turns["length"].shape[0], ring=ring)

    def apply(self, todo: Pass, **values: DeviceArray | int | None) -> None:
        """Queue the wait for the answer, and what it rules out of the pass's logits.

        `verified`, `first`, `live` and `batch` are as the launch names them.
        """
        waited = {name: self[name] for name in ("ruled", "answered", "late", "step")}
        todo.launch_plain("await_masks", **waited, patience_us=PATIENCE_US)
        own = {name: self[name] for name in ("masks", "masked", "ruled")}
        words, logits = self["masks"].shape[-1], todo.work["logits"]
        todo.launch_plain("mask_logits", logits=logits, **own, **values, vocabulary=logits.shape[-1], words=words)

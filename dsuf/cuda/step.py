"""The decode step: everything from the turns that are wanted to the record that the host reads, on the device.

    gather turns, draft a block each, place verify rows, backbone, logits, sample, judge, advance, feed the draft head

The same launches serve plain decoding, with no drafts. What differs from step to step is read from device memory, so a
step of a given shape can be captured once and replayed.
"""

from collections.abc import Mapping

import msgspec

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.draft import Draft
from dsuf.cuda.ends import sample_rows
from dsuf.cuda.kernels import Kernels
from dsuf.cuda.launches import Observer, Pass
from dsuf.cuda.logits.ratings import Ratings, plan_ratings
from dsuf.cuda.logits.rules import Rules, plan_rules
from dsuf.cuda.model import Model
from dsuf.cuda.results import RESULT_STEPS, Results, plan_results
from dsuf.cuda.streams import Sides
from dsuf.cuda.turns import Turns
from dsuf.cuda.workspace import Workspace

FOR_TOKENS = 0
"""The purpose of a token's random numbers, as the sampling kernel counts purposes."""

RULES = {"token": 0, "block": 1}


class StepShape(msgspec.Struct, frozen=True):
    """What a captured step depends on: turns, drafts to verify of each at most, positions of the longest turn.

    `extras`: whether some turn may keep to a constraint or ask for log-probabilities.
    """

    batch: int
    drafts: int
    tokens: int
    extras: bool = False

    @property
    def rows(self) -> int:
        """Rows of the verification."""
        return self.batch * (self.drafts + 1)


def entries_of(tokens: int) -> Mapping[int, int]:
    """Compressed entries of a turn of `tokens` positions at each ratio, in multiples of 8."""
    return {ratio: -(-tokens // (8 * ratio)) * 8 for ratio in (1, 2)}


def plan_step(config: ModelConfig, batch: int) -> list[Region]:
    """The regions of decode steps for up to `batch` turns, workspaces apart."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "wanted": ("i32", (batch,)),
        "turn": ("i32", (batch,)),
        "live_turns": ("i32", (1,)),
        "verified": ("i32", (batch,)),
        "first": ("i32", (batch,)),
        "over": ("i64", (batch, config.dspark_block_size)),
        "kept": ("i32", (batch,)),
        "next": ("i32", (batch,)),
    }
    regions = [Region(f"step.{name}", kind, shape, "workspaces") for name, (kind, shape) in shapes.items()]
    block = config.dspark_block_size
    extras = [*plan_rules("decode", config, batch), *plan_ratings("decode", batch, block)]
    return [*regions, *plan_results("decode", batch, block), *extras]


class Decoder:
    """Queues decode steps. `rule` and `threshold` are those of the acceptance and of the drafts' length.

    With `sides` parts of a step run beside each other.
    """

    def __init__(
        self, arena: Arena, kernels: Kernels, model: Model, draft: Draft | None, turns: Turns, *, rule: str,
        threshold: float, eos_id: int,
    ) -> None:  # fmt: skip
        self.arena, self.kernels, self.model, self.draft, self.turns = arena, kernels, model, draft, turns
        self.rule, self.threshold, self.eos_id = RULES[rule], threshold, eos_id
        self.config, self.slots = model.config, model.caches.sizes.slots
        self.work, self.draft_work = Workspace(arena, "decode"), Workspace(arena, "draft")
        self.results = Results(arena, "decode")
        self.rules, self.ratings = Rules(arena, "decode"), Ratings(arena, "decode")
        self.sides: Sides | None = None

    def queue(self, shape: StepShape, stream: int, observer: Observer | None = None) -> None:
        """Queue one step of `shape` for the turns in `wanted`."""
        todo = self._pass(self.work, shape.rows, shape, stream, observer)
        self._gather(shape, todo)
        if shape.drafts and self.draft is not None:
            blocks = self._pass(self.draft_work, shape.batch * self.config.dspark_block_size, shape, stream, observer)
            rate = self.threshold > 0
            self.draft.propose(blocks, shape.batch, self["live_turns"], self["turn"], rate=rate)
        self._verify(shape, todo)
        if shape.extras:
            self._ask(shape, todo)
        self.model.forward(todo)
        self.model.head(todo)
        if shape.extras:
            self.ratings.rank(todo, shape.rows)
            self.rules.apply(todo, **{name: self[name] for name in ("verified", "first")}, **self._batch(shape))
        sample_rows(todo, self.config.vocab_size, shape.rows, todo.work["live"], purpose=FOR_TOKENS)
        if shape.drafts:
            self._judge(shape, todo)
        if shape.extras:
            self._rate(shape, todo)
        self._advance(shape, todo)
        if self.draft is not None:
            self.draft.feed(todo, todo.work["feed_place"])

    def __getitem__(self, name: str) -> Array:
        return self.arena[f"step.{name}"]

    def _pass(
        self, work: Workspace, rows: int, shape: StepShape, stream: int, observer: Observer | None
    ) -> Pass:  # fmt: skip
        return Pass(
            self.kernels, stream, work, self.turns, rows, entries_of(shape.tokens), fresh=False, observer=observer,
            sides=self.sides,
        )  # fmt: skip

    def _gather(self, shape: StepShape, todo: Pass) -> None:
        todo.launch_plain(
            "gather_turns", wanted=self["wanted"], done=self.turns["done"], turn=self["turn"],
            live_turns=self["live_turns"], live_rows=self.draft_work["live"], batch=shape.batch, turns=self.slots,
        )  # fmt: skip

    def _verify(self, shape: StepShape, todo: Pass) -> None:
        """Queue the rows of anchors and drafts."""
        work, drafts = todo.work, self.draft_work
        rows = {name: work[name] for name in ("row_slot", "row_position", "row_id")}
        todo.launch_plain(
            "place_verify", turn=self["turn"], length=self.turns["length"], anchor=self.turns["anchor"],
            drafts=drafts["picked"] if shape.drafts else None,
            confidence=drafts["confidence"] if shape.drafts and self.threshold > 0 else None,
            verified=self["verified"], first=self["first"], **rows, live_rows=work["live"], live=self["live_turns"],
            batch=shape.batch, turns=self.slots, rows=shape.rows, limit=shape.drafts, threshold=self.threshold,
        )  # fmt: skip

    def _batch(self, shape: StepShape) -> dict[str, Array | int]:
        return {"live": self["live_turns"], "batch": shape.batch}

    def _ask(self, shape: StepShape, todo: Pass) -> None:
        """Queue the step's question to the host."""
        drafts = self.draft_work["picked"] if shape.drafts else None
        turns = {"turn": self["turn"], "verified": self["verified"], "drafts": drafts}
        self.rules.ask(todo, self.model.caches.sizes.ring_rows, **turns, **self._batch(shape))

    def _rate(self, shape: StepShape, todo: Pass) -> None:
        """Queue the log-probabilities of what was chosen."""
        some = shape.drafts > 0
        chosen = {"kept": self["kept"] if some else None, "next": self["next"] if some else todo.work["picked"]}
        self.ratings.rate(todo, turn=self["turn"], first=self["first"], **chosen, **self._batch(shape))

    def _judge(self, shape: StepShape, todo: Pass) -> None:
        """Queue what is kept of each turn's drafts, and the token after them."""
        found = ("logits", "peak", "least", "last", "mass")
        drafted = {f"draft_{name}": self.draft_work[name] for name in found}
        values = {
            **{name: todo.work[name] for name in ("picked", *found)}, **drafted, "drafts": self.draft_work["picked"],
            **{name: self[name] for name in ("turn", "first", "verified", "over", "kept", "next")},
            **{name: self.turns[name] for name in ("length", "temperature", "seed")}, "live": self["live_turns"],
        }  # fmt: skip
        sizes = {
            "batch": shape.batch, "rows": shape.rows, "turns": self.slots, "vocabulary": self.config.vocab_size,
            "rule": self.rule,
        }  # fmt: skip
        for entry in ("weigh_drafts", "judge_drafts") if self.rule else ("judge_drafts",):
            todo.launch_plain(entry, **values, **sizes)

    def _advance(self, shape: StepShape, todo: Pass) -> None:
        """Queue the turns' new state and the step's record."""
        some = shape.drafts > 0
        drafts = {
            "drafts": self.draft_work["picked"] if some else None, "kept": self["kept"] if some else None,
            "next": self["next"] if some else todo.work["picked"],
        }  # fmt: skip
        advance_turns(
            todo, self.results, turn=self["turn"], verified=self["verified"], first=self["first"], **drafts,
            feed_place=todo.work["feed_place"], live=self["live_turns"], rows=shape.rows, fed=1,
            ring=self.model.caches.sizes.ring_rows, eos_id=self.eos_id,
        )  # fmt: skip


def advance_turns(todo: Pass, results: Results, **values: DeviceArray | int | None) -> None:
    """Queue the end of a step: the turns' new state, and its record in `results`."""
    turns = todo.turns
    state = {name: turns[name] for name in ("length", "anchor", "generated", "max_tokens", "done")}
    # The batch is that of the ring of records, whatever the step's: records of several shapes are under way at once.
    todo.launch_plain(
        "advance_turns", **values, **state, **results.arrays, batch=results.batch, turns=turns["length"].shape[0],
        result_steps=RESULT_STEPS,
    )  # fmt: skip

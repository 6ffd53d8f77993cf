"""Prefill on the device: the passes that a range of a prompt takes, and the first token behind its end.

`exact` runs every layer on every position. `replay` runs the encoder on all, with what the first decoder layer takes
from every position, and every layer on the last window of the prompt alone, with the decoder's windows cut where that
begins. That last pass runs the encoder again on positions that an earlier one had: the same numbers in the same places.
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import Arena, Array, write_array
from dsuf.cuda.draft import Draft
from dsuf.cuda.ends import sample_rows
from dsuf.cuda.kernels import Kernels
from dsuf.cuda.launches import Observer, Pass
from dsuf.cuda.logits.ratings import Ratings
from dsuf.cuda.logits.rules import Rules
from dsuf.cuda.model import Model
from dsuf.cuda.results import Results
from dsuf.cuda.step import FOR_TOKENS, advance_turns, entries_of
from dsuf.cuda.streams import Sides
from dsuf.cuda.turns import DECODER, DRAFT, Turns
from dsuf.cuda.workspace import Workspace

PassKind = Literal["encode", "forward"]
PrefillMode = Literal["exact", "replay"]


class Part(NamedTuple):
    """Positions `start` to `stop` (exclusive) in one pass: through the encoder alone, or through all layers."""

    kind: PassKind
    start: int
    stop: int


def plan_parts(
    start: int, stop: int, decoded: int, *, last: bool, mode: PrefillMode, window: int, most: int
) -> list[Part]:
    """The passes, of at most `most` rows, that take a turn from `start` positions to `stop`; pure.

    All layers have seen `decoded` positions. `last` says that the prompt ends at `stop`.
    """
    if mode == "exact":
        return _cut("forward", start, stop, most)
    if not last:
        return _cut("encode", start, stop, most)
    tail = max(decoded, stop - window)
    return _cut("encode", start, max(start, tail), most) + _cut("forward", tail, stop, most)


def _cut(kind: PassKind, start: int, stop: int, most: int) -> list[Part]:
    return [Part(kind, first, min(first + most, stop)) for first in range(start, stop, most)]


class SplitPass(Kernels):
    """Launches one pass whose rows are divided among ranks."""

    def finish(self, stream: int, *names: str) -> None:
        """Queue that all ranks have all rows of the arrays `names`."""
        raise NotImplementedError


class Split(Protocol):
    """Divides the rows of passes among ranks."""

    def put_live(self, rows: int, stream: int) -> None:
        """Say how many rows the next pass has."""

    def begin(self, rows: int) -> SplitPass | None:
        """What launches a pass of up to `rows` rows; None where it is not to be divided."""

    def beside(self, sides: Sides | None) -> Sides | None:
        """The side streams of such a pass."""


class Prefiller:
    """Queues passes over the rows of one turn, and first tokens; with `sides` parts of a pass run beside each other.

    With `split` ranks divide the rows among them; the results are the same, to the bit.
    """

    def __init__(
        self, arena: Arena, kernels: Kernels, model: Model, draft: Draft | None, turns: Turns, *, eos_id: int
    ) -> None:
        self.arena, self.kernels, self.model, self.draft, self.turns = arena, kernels, model, draft, turns
        self.eos_id, self.work, self.results = eos_id, Workspace(arena, "prefill"), Results(arena, "prefill")
        self.rules, self.ratings = Rules(arena, "prefill"), Ratings(arena, "prefill")
        self.sides: Sides | None = None
        self.split: Split | None = None

    def put_rows(self, slot: int, start: int, ids: NDArray[np.int64], stream: int) -> None:
        """Say whose rows the next pass has: positions of the turn in `slot` from `start` on, with their tokens."""
        rows = len(ids)
        facts = {
            "row_slot": np.full(rows, slot), "row_position": np.arange(start, start + rows), "row_id": ids,
            "live": np.array([rows]),
        }  # fmt: skip
        for name, values in facts.items():
            write_array(self.work[name], values, stream)
        if self.split is not None:
            self.split.put_live(rows, stream)

    def queue(self, kind: PassKind, rows: int, tokens: int, stream: int, observer: Observer | None = None) -> None:
        """Queue a pass over up to `rows` rows of a turn of up to `tokens` positions."""
        todo = self._pass(self.work, rows, tokens, stream, observer)
        # An observer looks at all rows of everything.
        divided = self.split.begin(rows) if self.split is not None and observer is None else None
        if self.split is not None and divided is not None:
            todo.kernels, todo.sides = divided, self.split.beside(self.sides)
        self._run(kind, todo)
        if divided is not None:
            divided.finish(stream, *(("streams", "ffn.pre") if kind == "forward" else ()))

    def _run(self, kind: PassKind, todo: Pass) -> None:
        if kind == "encode":
            self.model.encode(todo)
            return
        self.model.forward(todo)
        if self.draft is not None:
            self.draft.feed(todo, self.work["ring_place"])

    def cut_windows(self, slot: int, start: int, stream: int) -> None:
        """Let the windows of the decoder and of the draft head begin at `start`, from the next pass on."""
        for part in (DECODER, DRAFT):
            write_array(self.turns["floors"][slot].rows(part, part + 1), np.array([start]), stream)

    def choose_first(self, slot: int, row: int, length: int, stream: int, *, extras: bool = False) -> int:
        """Queue the token behind row `row` of the last pass, the prompt's end at `length`; the step of its record.

        With `extras` as in a step's shape.
        """
        work = self.work
        at = {name: work[name].rows(row, row + 1) for name in ("streams", "ffn.pre", "row_slot", "row_position")}
        todo = self._pass(Workspace(self.arena, "prefill", at | {"live": self.arena["one"]}), 1, 8, stream, None)
        self.turns.write("length", slot, length, stream)
        turn: dict[str, Array | int] = {"turn": at["row_slot"], "live": self.arena["one"], "batch": 1}
        if extras:
            self.rules.ask(todo, self.model.caches.sizes.ring_rows, drafts=None, verified=None, **turn)
        self.model.head(todo)
        if extras:
            self.ratings.rank(todo, 1)
            self.rules.apply(todo, verified=None, first=None, live=self.arena["one"], batch=1)
        sample_rows(todo, self.model.config.vocab_size, 1, self.arena["one"], purpose=FOR_TOKENS)
        if extras:
            self.ratings.rate(todo, **turn, first=None, kept=None, next=work["picked"])
        advance_turns(
            todo, self.results, turn=at["row_slot"], verified=None, first=None, drafts=None, kept=None,
            next=work["picked"], feed_place=None, live=self.arena["one"], rows=1, fed=0,
            ring=self.model.caches.sizes.ring_rows, eos_id=self.eos_id,
        )  # fmt: skip
        return self.results.launch()

    def _pass(
        self, work: Workspace, rows: int, tokens: int, stream: int, observer: Observer | None
    ) -> Pass:  # fmt: skip
        entries = entries_of(tokens)
        return Pass(
            self.kernels, stream, work, self.turns, rows, entries, fresh=True, observer=observer, sides=self.sides
        )

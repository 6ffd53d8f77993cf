"""Runs recorded turns on an engine, one at a time, behind what they began with."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from dsuf.errors import CheckpointError
from dsuf.replay.lineage import find_makers, taken_tokens
from dsuf.types import Constraint, Engine, PrefillRange, Prompt, SessionState, StepPlan, StepResult, Turn, TurnRecord

MOST_MAKERS = 4
_ROUND = 32
_KEPT = 4


class Lost(Exception):
    """A turn cannot be computed again; the text says why."""


class Left(msgspec.Struct, frozen=True):
    """What another turn goes on from: the rows of the first pages, and the state at some length."""

    rows: Sequence[bytes]
    state: SessionState | None


class Player:
    """Computes turns again on `engine`, which nobody else uses; `records` are all that there are, in any order.
    `decode` gives the text of a grammar's ids."""

    def __init__(
        self, engine: Engine, records: Sequence[TurnRecord], decode: Callable[[Sequence[int]], str]
    ) -> None:  # fmt: skip
        self._engine, self._decode = engine, decode
        self._records = sorted(records, key=lambda record: record.begun_s)
        self._beginnings: OrderedDict[str, list[Left | None]] = OrderedDict()

    async def play(self, record: TurnRecord) -> list[int]:
        """The tokens of `record`, computed again; where several turns can have left what it began with, those that come
        nearest to what was recorded. Raises `Lost`."""
        best: list[int] | None = None
        for left in await self._find_beginnings(record):
            results = await self._compute(record, left)
            ids = [token for result in results for token in result.ids]
            if ids[: len(record.ids)] == list(record.ids):
                return ids
            best = best if best is not None else ids
        if best is None:
            raise Lost(f"no record of a turn that left its first {record.start} tokens")
        return best

    async def _find_beginnings(self, record: TurnRecord) -> list[Left | None]:
        """What the turn can have begun with; None for nothing."""
        if not record.start:
            return [None]
        if record.turn not in self._beginnings:  # of a conversation each turn is asked for it by all that follow
            self._beginnings[record.turn] = await self._make_beginnings(record)
            while len(self._beginnings) > _KEPT:
                self._beginnings.popitem(last=False)
        return self._beginnings[record.turn]

    async def _make_beginnings(self, record: TurnRecord) -> list[Left | None]:
        """What can have been left by turns before it."""
        replay_tokens, found = self._engine.layout.replay_tokens, list[Left | None]()
        for maker in find_makers(record, self._records, replay_tokens)[:MOST_MAKERS]:
            for beginning in await self._find_beginnings(maker):
                left = await self._leave(maker, beginning, record, taken_tokens(record, replay_tokens))
                if left is not None:
                    found.append(left)
                    break
        return found

    async def _leave(self, maker: TurnRecord, beginning: Left | None, record: TurnRecord, taken: int) -> Left | None:
        """Compute `maker` and take what `record` went on from; None where it has no such state."""
        collected: list[Left] = []
        try:
            await self._compute(maker, beginning, collected=collected, taken=taken, state_tokens=record.state_tokens)
        except CheckpointError:
            return None
        return collected[0] if collected else None

    async def _compute(
        self, record: TurnRecord, left: Left | None, *, collected: list[Left] | None = None, taken: int = 0,
        state_tokens: int = 0,
    ) -> list[StepResult]:  # fmt: skip
        """All steps of `record`; with `collected`, to which it is added, also what `taken` positions and a state of
        `state_tokens` are."""
        engine, turn = self._engine, self._make_turn(record)
        tokens = len(record.prompt) + record.sampling.max_tokens + engine.layout.overrun_tokens
        pages = list(range(engine.layout.pages_for(tokens)))
        engine.attach(turn, pages)
        try:
            await self._begin(record, left, pages)
            results: list[StepResult] = []
            state: SessionState | None = None
            for step in record.steps:
                plan = StepPlan(decode=(turn.id,), drafts=step.drafts)
                if step.kind == "prefill":
                    plan = StepPlan(prefill=(PrefillRange(turn.id, step.start, step.stop),))
                results += await engine.step(plan)
                if collected is not None and state is None and state_tokens:
                    state = await self._look(record, results, state_tokens)
            if collected is not None and (state is not None or not state_tokens):
                rows = await self._read_rows(pages[: engine.layout.pages_for(taken)])
                collected.append(Left(rows, state))
            return results
        finally:
            engine.detach(turn.id)

    def _make_turn(self, record: TurnRecord) -> Turn:
        """The turn as it was."""
        grammar, constraint = record.grammar, None
        if grammar is not None:
            constraint = Constraint(grammar=self._decode(grammar.ids), begins=grammar.begins)
        prompt = Prompt(ids=record.prompt, opens_in=record.opens_in)
        return Turn(id=record.turn, prompt=prompt, sampling=record.sampling, constraint=constraint)

    async def _begin(self, record: TurnRecord, left: Left | None, pages: Sequence[int]) -> None:
        """Let the attached turn take over what it began with, if it did not begin with nothing."""
        if not record.start:
            return
        length = taken_tokens(record, self._engine.layout.replay_tokens)
        if left is not None:
            await self._engine.write_pages(pages[: len(left.rows)], [memoryview(row) for row in left.rows])
        start = await self._engine.resume(record.turn, length, left.state if left is not None else None)
        if start != record.start:
            raise CheckpointError(f"goes on at {start}, not at {record.start}")

    async def _look(
        self, record: TurnRecord, results: Sequence[StepResult], state_tokens: int
    ) -> SessionState | None:  # fmt: skip
        """The turn's state, if it is one of `state_tokens` now. It is read only where it can be: it is large."""
        computed = max((result.prefilled for result in results), default=0)
        near = computed + sum(len(result.ids) for result in results)
        if abs(near - state_tokens) > _ROUND:
            return None
        state = await self._engine.read_state(record.turn)
        return state if state is not None and state.length == state_tokens else None

    async def _read_rows(self, pages: Sequence[int]) -> list[bytes]:
        """The rows of `pages`."""
        buffers = [bytearray(self._engine.layout.page_bytes) for _ in pages]
        await self._engine.read_pages(pages, [memoryview(buffer) for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

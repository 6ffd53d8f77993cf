"""Schedules on the reference engine in exact mode: besides the tokens, the bytes of the global cache are those of a
lone cold run, in every turn that was in the engine, however it left."""

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.model import Model, PrefillMode
from dsuf.reference.speculate import Drafter
from dsuf.types import PrefillRange, StepPlan, StepResult, Turn
from tests.toy import make_turn
from tests.turns.schedule import Schedule
from tests.turns.world import STEM_TOKENS, World

PAGE_TOKENS = 16
"""Smaller than the engine's own, so that short prompts have several."""
_CALLS = {"run": "step", "take_over": "resume", "copy_state": "read_state"}


@contextmanager
def small_pages() -> Iterator[None]:
    """Within, engines are made with pages of 16 positions."""
    with ExitStack() as stack:
        for module in ("engine", "pages"):
            stack.enter_context(patch(f"dsuf.reference.{module}.PAGE_TOKENS", PAGE_TOKENS))
        yield


class Call:
    """A call to the engine that takes `seconds` of virtual time."""

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        self.function, self.seconds = function, seconds

    def __call__(self, *arguments: object) -> Any:
        return self.function(*arguments)


class WatchedReference(ReferenceEngine):
    """Asks `before` as the toy engine does, counts what it computes, and keeps the caches of turns that left."""

    before: Callable[[str], float]

    def __init__(self, model: Model, drafter: Drafter | None, pages: int, max_turns: int, mode: PrefillMode) -> None:
        super().__init__(
            model, "reference", "test", context_tokens=400, max_turns=max_turns, prefill=mode, pages=pages,
            drafter=drafter,
        )  # fmt: skip
        self.facts = msgspec.structs.replace(self.facts, eos_id=-1)
        self.pool.pages[:] = 0xA5
        self.before = lambda call: 0.0
        self.violations: list[str] = []
        self.computed: Counter[str] = Counter()
        self.attached: Counter[str] = Counter()
        self.gone: list[tuple[Turn, int, dict[str, bytes]]] = []

    def attach(self, turn: Turn, pages: Any) -> None:
        super().attach(turn, pages)
        self.attached[turn.id] += 1

    def detach(self, turn: str) -> None:
        held = self._turns.get(turn)
        if held is not None and held.cache.length:
            self.gone.append((held.turn, held.cache.length, dict(held.cache.global_parts())))
        super().detach(turn)

    def run(self, plan: StepPlan) -> list[StepResult]:
        results = super().run(plan)
        for part in plan.prefill:
            self.computed[part.turn] += part.stop - part.start
        return results

    def _queue(self, function: Callable[..., Any], *arguments: object) -> Coroutine[Any, Any, Any]:
        """As before, at the pace that `before` says, or failing."""
        copies = {self.pool.read: "read_pages", self.pool.write: "write_pages"}
        name = _CALLS.get(function.__name__) or copies[arguments[0]]  # type: ignore[index]
        try:
            return super()._queue(Call(function, 0.001 + self.before(name)), *arguments)
        except OSError as error:
            return super()._queue(Call(_fail, 0.001), error)


def _fail(error: OSError) -> None:
    raise error


class Cold(NamedTuple):
    """What a turn gives alone: its tokens, and the cache behind the last that was fed."""

    tokens: list[int]
    parts: dict[str, bytes]


class Oracle:
    """Cold runs, each in an engine of its own; remembered."""

    def __init__(self, model: Model, drafter: Drafter) -> None:
        self.model, self.drafter = model, drafter
        self._known: dict[Any, Cold] = {}

    def run(self, turn: Turn, eos_id: int = -1) -> Cold:
        """`turn` without drafts, in one chunk."""
        key = (turn.prompt.ids, turn.sampling, eos_id)
        if key not in self._known:
            self._known[key] = self._compute(turn, eos_id)
        return self._known[key]

    def _compute(self, turn: Turn, eos_id: int) -> Cold:
        engine = ReferenceEngine(
            self.model, "reference", "test", context_tokens=400, max_turns=1, prefill="exact",
        )  # fmt: skip
        engine.facts = msgspec.structs.replace(engine.facts, eos_id=eos_id)
        engine.attach(turn, range(engine.layout.pages))
        [result] = engine.run(StepPlan(prefill=(PrefillRange(turn.id, 0, len(turn.prompt.ids)),)))
        tokens = list(result.ids)
        while result.finish is None:
            [result] = engine.run(StepPlan(decode=(turn.id,)))
            tokens += result.ids
        return Cold(tokens, dict(engine._turns[turn.id].cache.global_parts()))


class ReferenceWorld(World):
    """A world of the reference engine. Where replies may end by themselves, a token of a usual reply ends them."""

    def __init__(self, schedule: Schedule, oracle: Oracle) -> None:
        self.oracle, self.schedule = oracle, schedule
        self.eos_id = -1
        if schedule.setting.stop_every:
            usual = make_turn("usual", [3 + i for i in range(min(40, STEM_TOKENS))], max_tokens=6)
            self.eos_id = oracle.run(usual).tokens[-1]
        super().__init__(schedule)

    mode: PrefillMode = "exact"

    def make_engine(self) -> WatchedReference:
        setting = self.schedule.setting
        pages = setting.pages * setting.page_tokens // PAGE_TOKENS
        with small_pages():
            engine = WatchedReference(
                self.oracle.model, self.oracle.drafter if setting.drafts else None, pages, setting.max_turns, self.mode
            )
        engine.facts = msgspec.structs.replace(engine.facts, eos_id=self.eos_id)
        return engine

    def count_blocks(self, engine: WatchedReference) -> int:
        """As many entries as in the toy engine's arena: a state is larger here."""
        return self.schedule.setting.blocks * (4 + engine.layout.state_bytes // engine.layout.page_bytes) // 5

    def cold_tokens(self, turn: Turn) -> list[int]:
        return self.oracle.run(turn, self.eos_id).tokens

    def check_gone(self) -> None:
        """The global cache of each turn that left is the beginning of that of its cold run."""
        for half in self.halves:
            self.ends["compared"] += check_parts(self.oracle, half.engine, self.eos_id)


class ReplayWorld(ReferenceWorld):
    """One in replay mode: tokens hang on what is taken over, so they are compared by the audit, which begins where the
    turn began and drafts nothing."""

    mode: PrefillMode = "replay"

    def check_tokens(self, turn: Turn, tokens: list[int], whole: bool) -> None:
        """A whole reply is as long as it says."""
        assert not whole or len(tokens) <= turn.sampling.max_tokens

    def check_gone(self) -> None:
        """Caches hang on what was taken over."""


def check_parts(oracle: Oracle, engine: WatchedReference, eos_id: int = -1) -> int:
    """See that the caches of turns that left have the bytes that they have alone; how many those were."""
    for turn, length, parts in engine.gone:
        cold = oracle.run(turn, eos_id)
        for name, rows in parts.items():
            common = min(len(rows), len(cold.parts[name]))  # alone, the last token of a reply is never fed
            assert rows[:common] == cold.parts[name][:common], f"{turn.id}: {name} of {length} positions"
    return len(engine.gone)


def make_greedy(schedule: Schedule) -> Schedule:
    """`schedule` with greedy turns only: with drafts, what is drawn hangs on them."""
    clients = []
    for client in schedule.clients:
        visits = tuple(msgspec.structs.replace(visit, temperature=0.0) for visit in client.visits)
        clients.append(msgspec.structs.replace(client, visits=visits))
    return msgspec.structs.replace(schedule, clients=tuple(clients))

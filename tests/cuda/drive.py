"""Drives an engine by hand: turns from prompts, greedy runs, and the bytes that they leave."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import read_array
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Machine
from dsuf.cuda.prefill import PrefillMode
from dsuf.types import Allowed, Constraint, OpenMask, PrefillRange, Prompt, Sampling, StepPlan, StepResult, Turn

_NUMBERS = count()


class ThirdMask:
    """Allows a third of all tokens at each place, which one depends on all tokens before; `pause_s` is its time.

    Behind `most` tokens nothing but `end` may come, which is a fault.
    """

    threads = ThreadPoolExecutor(4)

    def __init__(self, vocabulary: int, *, pause_s: float = 0.0, most: int = 1 << 30, end: int = 1) -> None:
        self.vocabulary, self.pause_s, self.most, self.end = vocabulary, pause_s, most, end
        self.taken: list[int] = []

    def ask(self, ids: Sequence[int], drafts: Sequence[int]) -> "Future[Allowed]":
        """See `dsuf.types.Mask`."""
        return self.threads.submit(self._answer, list(ids), list(drafts))

    def _answer(self, ids: list[int], drafts: list[int]) -> Allowed:
        time.sleep(self.pause_s)
        for token in ids:
            assert self._find(self.taken)[token], "a token was taken that may not come"
            self.taken.append(token)
        rows = [self._find(self.taken)]
        for i, token in enumerate(drafts):
            if not rows[-1][token] or token == self.end:
                break
            rows.append(self._find([*self.taken, *drafts[: i + 1]]))
        packed = [np.packbits(np.pad(row, (0, -len(row) % 32)), bitorder="little").tobytes() for row in rows]
        over = len(self.taken) + len(rows) - 1 >= self.most
        return Allowed(tuple(packed), "enough was said" if over else None)

    def _find(self, taken: list[int]) -> NDArray[np.bool_]:
        tokens = np.arange(self.vocabulary)
        if len(taken) >= self.most:
            return tokens == self.end
        return (tokens + 7 * sum(taken) + len(taken)) % 3 == 0


RULE = Constraint(grammar="a third")


@contextmanager
def share(machine: Machine, mode: PrefillMode, open_mask: OpenMask | None = None) -> Iterator[CudaEngine]:
    """An engine on a machine that others use too. What it has queued is done when this ends: the next test may
    have another driver."""
    engine = CudaEngine(machine, "weights", mode, open_mask=open_mask)
    try:
        yield engine
    finally:
        asyncio.run(engine.close(keep_machine=True))


def make_turn(
    ids: Sequence[int] | NDArray[np.int64], max_tokens: int, constraint: Constraint | None = None, **sampling: float
) -> Turn:
    """A turn, greedy unless told otherwise."""
    chosen = {"temperature": 0.0, "top_p": 1.0, "seed": 1} | sampling
    prompt = Prompt(ids=tuple(int(token) for token in ids))
    told = Sampling(max_tokens=max_tokens, **chosen)
    return Turn(id=f"turn-{next(_NUMBERS)}", prompt=prompt, sampling=told, constraint=constraint)


def count_pages(turn: Turn) -> int:
    """Pages that `turn` can ever need."""
    return -(-(len(turn.prompt.ids) + turn.sampling.max_tokens + 8) // PAGE_TOKENS)


def prefill(engine: CudaEngine, turn: Turn, start: int = 0, chunk: int | None = None, ahead: int = 0) -> StepResult:
    """Prefill the prompt from `start` on, `ahead` chunks launched beyond the one awaited; the first token."""
    length, size = len(turn.prompt.ids), chunk or len(turn.prompt.ids)
    parts = [PrefillRange(turn.id, first, min(length, first + size)) for first in range(start, length, size)]
    for first in range(0, len(parts), 1 + ahead):
        group = parts[first : first + 1 + ahead]
        told = engine.run(*[StepPlan(prefill=(part,)) for part in group])
        assert [results[0].prefilled for results in told] == [part.stop for part in group]
    return told[-1][0]


def decode(engine: CudaEngine, turns: Sequence[Turn], drafts: int = 0, ahead: int = 0) -> dict[str, list[int]]:
    """Decode all `turns` together to their ends, `ahead` steps launched before the first is read."""
    ids: dict[str, list[int]] = {turn.id: [] for turn in turns}
    going = set(ids)
    while going:
        plan = StepPlan(decode=tuple(turn.id for turn in turns if turn.id in going), drafts=drafts)
        for results in engine.run(*[plan] * (1 + ahead)):
            for result in results:
                assert result.turn in going, "a turn that has ended gave a result"
                ids[result.turn] += result.ids
                if result.finish:
                    going.remove(result.turn)
    return ids


def generate(
    engine: CudaEngine, prompts: Sequence[NDArray[np.int64]], max_tokens: int, *, chunk: int | None = None,
    drafts: int = 0, ahead: int = 0, **sampling: float,
) -> list[list[int]]:  # fmt: skip
    """Replies to `prompts`, which decode together."""
    turns = [make_turn(prompt, max_tokens, **sampling) for prompt in prompts]
    first, used = {}, 0
    for turn in turns:
        engine.attach(turn, range(used, used + count_pages(turn)))
        used += count_pages(turn)
        first[turn.id] = prefill(engine, turn, chunk=chunk, ahead=ahead)
    rest = decode(engine, [turn for turn in turns if not first[turn.id].finish], drafts, ahead)
    for turn in turns:
        engine.detach(turn.id)
    return [[*first[turn.id].ids, *rest.get(turn.id, [])] for turn in turns]


def read_caches(machine: Machine, positions: int) -> bytes:
    """The global cache of the first `positions` positions of the turn in the first pages."""
    caches, config = machine.caches, machine.config
    return b"".join(
        read_array(store)[: positions // config.ratio(layer)].tobytes()
        for layer in config.kv_source_layers for store in (caches.entries(layer), caches.index_keys(layer))
    )  # fmt: skip

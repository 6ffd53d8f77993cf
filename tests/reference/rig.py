"""Turns of a reference engine by hand: pages for them, and what comes of plans."""

from collections.abc import Sequence

import numpy as np

from dsuf.reference.arithmetic import I64
from dsuf.reference.engine import ReferenceEngine
from dsuf.types import PrefillRange, Prompt, Sampling, SessionState, StepPlan, StepResult, Turn


def make_turn(name: str, ids: I64, max_tokens: int = 8, temperature: float = 0.0, seed: int = 5) -> Turn:
    """A turn whose prompt is `ids`."""
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=seed, max_tokens=max_tokens)
    return Turn(id=name, prompt=Prompt(ids=tuple(ids.tolist())), sampling=sampling)


def attach(engine: ReferenceEngine, turn: Turn, first: Sequence[int] = ()) -> list[int]:
    """Attach `turn` with the pages `first`, then such as no turn has, in a random order; returns all of them."""
    taken = {page for attached in engine._turns.values() for page in attached.table.pages.tolist()}
    free = [page for page in range(engine.layout.pages) if page not in taken.union(first)]
    np.random.default_rng(len(turn.prompt.ids)).shuffle(free)
    wanted_tokens = len(turn.prompt.ids) + turn.sampling.max_tokens + engine.layout.overrun_tokens
    pages = [*first, *free][: engine.layout.pages_for(wanted_tokens)]
    engine.attach(turn, pages)
    return pages


def prefill(engine: ReferenceEngine, turn: Turn, start: int = 0, stop: int = 0, chunk: int = 400) -> list[int]:
    """Run the prompt of an attached turn from `start` to `stop` (0: its end) in chunks; the tokens that came of it."""
    stop, reply = stop or len(turn.prompt.ids), list[int]()
    for first in range(start, stop, chunk):
        [result] = engine.run(StepPlan(prefill=(PrefillRange(turn.id, first, min(first + chunk, stop)),)))
        reply += result.ids
    return reply


def decode(engine: ReferenceEngine, turn: Turn, drafts: int = 0) -> list[int]:
    """Run a turn whose prompt is done to its end, alone; its tokens."""
    reply = list[int]()
    while results := engine.run(StepPlan(decode=(turn.id,), drafts=drafts)):
        reply += results[0].ids
    return reply


def tokens(results: list[StepResult]) -> list[int]:
    """The tokens of all results."""
    return [token for result in results for token in result.ids]


def global_bytes(engine: ReferenceEngine, turn: Turn) -> bytes:
    """The global cache of an attached turn."""
    return engine._turns[turn.id].cache.global_bytes()


async def take_over(engine: ReferenceEngine, source: Turn, turn: Turn, length: int, state: SessionState | None) -> int:
    """Attach `turn` behind the first `length` positions of `source`, as caches do it: whole pages are shared, the rows
    of the last one copied, `state` resumed. Returns where its prefill begins."""
    pages = engine._turns[source.id].table.pages.tolist()
    whole = length // engine.layout.page_tokens
    own = attach(engine, turn, pages[:whole])
    if length % engine.layout.page_tokens:
        rows = memoryview(bytearray(engine.layout.page_bytes))
        await engine.read_pages([pages[whole]], [rows])
        await engine.write_pages([own[whole]], [rows])
    return await engine.resume(turn.id, length, state)

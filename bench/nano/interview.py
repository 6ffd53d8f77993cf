"""Questions put to a reference engine through its protocol: cold, and behind what was computed before.

Some prompts begin alike: their shared part is computed once. A `cold` answer goes on in a copy of everything that this
left, in the midst of the prefill, hence equals that of a prompt computed alone. A `state` answer goes on from a host
copy of pages and state, as a session's next turn does; a `pages` answer from pages alone, behind a replayed window.
"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.pages import PAGE_TOKENS
from dsuf.types import Finish, PrefillRange, Prompt, Sampling, SessionState, StepPlan, StepResult, Turn

Start = Literal["cold", "state", "pages"]
Ids = tuple[int, ...]

CHUNK_TOKENS = 256
"""Positions of a prefill step, as `bin/serve` takes them."""
ONE_TOKEN = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=1)


class Question(NamedTuple):
    """A prompt, its true answer without the end-of-sentence token, and how the reply is drawn."""

    prompt: Ids
    answer: Ids
    sampling: Sampling


class Reply(NamedTuple):
    """What was generated, without the end-of-sentence token, in how many decode steps and seconds of them."""

    ids: Ids
    finish: Finish
    steps: int
    decode_s: float


class HostCopy(NamedTuple):
    """Pages and state of a turn, as bytes in host memory, behind `length` positions."""

    length: int
    pages: list[bytes]
    state: bytes


def measure_shared(prompts: Sequence[Ids]) -> int:
    """Positions that all `prompts` begin with, and of the shortest all but one; 0 for one prompt."""
    if len(prompts) < 2:
        return 0
    least, largest = min(prompts), max(prompts)  # what these two share, all do
    differing = (place for place, (a, b) in enumerate(zip(least, largest, strict=False)) if a != b)
    return min(next(differing, len(least)), min(map(len, prompts)) - 1)


def follows(earlier: Question, later: Question) -> bool:
    """Whether `later` is the next turn of the conversation that `earlier` asks in."""
    said = earlier.prompt + earlier.answer
    return later.prompt[: len(said)] == said


class Interview:
    """Puts questions to `engine`, one at a time, with `drafts` a step. Its pages must hold two of the turns."""

    def __init__(self, engine: ReferenceEngine, drafts: int) -> None:
        self.engine, self.drafts = engine, drafts
        self._free = list(range(engine.layout.pages))
        self._pages: dict[str, list[int]] = {}
        self._count = 0

    async def ask_all(self, questions: Sequence[Question], starts: Sequence[Start]) -> AsyncIterator[Reply]:
        """A reply to each of `questions`, which are one conversation, or ask about one text, or stand alone; to all of
        them from the first of `starts`, then from the next."""
        talks = all(map(follows, questions, questions[1:]))
        base, copy = await self._read(questions, [start for start in starts if start != "state" or not talks])
        for start in starts:
            if start == "state" and talks:
                async for reply in self._converse(questions):
                    yield reply
                continue
            for question in questions:
                yield await self._ask(question, base, copy, start)
        if base is not None:
            self._close(base)

    async def _converse(self, questions: Sequence[Question]) -> AsyncIterator[Reply]:
        """Each turn goes on from a host copy of the last one: behind its reply where that was right, else before."""
        copy: HostCopy | None = None
        for question in questions:
            name, first = self._open(question.prompt, question.sampling), 0
            if copy is not None:
                first = await self._restore(name, copy)
            begun = await self._prefill(name, first, len(question.prompt))
            before = await self._keep(name)
            reply = await self._decode(name, begun)
            copy = await self._keep(name) if reply.ids == question.answer else before
            self._close(name)
            yield reply

    async def _ask(self, question: Question, base: str | None, copy: HostCopy | None, start: Start) -> Reply:
        """The reply to a question whose text `base` has read and `copy` holds."""
        name, first = self._open(question.prompt, question.sampling), 0
        if base is not None and start == "cold":
            first = fork(self.engine, base, name)
        elif copy is not None:
            first = await self._restore(name, copy, stateless=start == "pages")
        reply = await self._decode(name, await self._prefill(name, first, len(question.prompt)))
        self._close(name)
        return reply

    async def _read(self, questions: Sequence[Question], starts: Sequence[Start]) -> tuple[str | None, HostCopy | None]:
        """A turn that is in the midst of what all `questions` begin with, and the copy of one that ended there; none
        where nothing is shared or none of `starts` needs it. What both have in common is computed once."""
        prompt, shared = questions[0].prompt, measure_shared([question.prompt for question in questions])
        if not shared or not starts:
            return None, None
        base, copy, first = self._open(prompt, ONE_TOKEN), None, 0
        if any(start != "cold" for start in starts):
            first = (shared - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            await self._prefill(base, 0, first)
            ended = self._open(prompt[:shared], ONE_TOKEN)
            if first:
                fork(self.engine, base, ended)
            await self._prefill(ended, first, shared)
            copy = await self._keep(ended)
            self._close(ended)
        await self._prefill(base, first, shared)
        return base, copy

    async def _prefill(self, name: str, start: int, stop: int) -> StepResult:
        """Compute positions `start` to `stop` of the turn's prompt; what the last step gave."""
        result = StepResult(turn=name)
        for first in range(start, stop, CHUNK_TOKENS):
            part = PrefillRange(name, first, min(first + CHUNK_TOKENS, stop))
            [result] = await self.engine.step(StepPlan(prefill=(part,)))
        return result

    async def _decode(self, name: str, result: StepResult) -> Reply:
        """The whole reply of a turn whose prefill ended with `result`."""
        ids, steps, started_s = result.ids, 0, time.perf_counter()
        while result.finish is None:
            [result] = await self.engine.step(StepPlan(decode=(name,), drafts=self.drafts))
            ids, steps = ids + result.ids, steps + 1
        return Reply(ids, result.finish, steps, time.perf_counter() - started_s)

    async def _keep(self, name: str) -> HostCopy:
        """A copy of all that a turn has computed."""
        state = await self.engine.read_state(name)
        assert state is not None, "a prompt that is done leaves a state"
        pages = self._pages[name][: -(-state.length // PAGE_TOKENS)]
        rows = [bytearray(self.engine.layout.page_bytes) for _ in pages]
        await self.engine.read_pages(pages, [memoryview(row) for row in rows])
        return HostCopy(state.length, [bytes(row) for row in rows], msgspec.msgpack.encode(state))

    async def _restore(self, name: str, copy: HostCopy, *, stateless: bool = False) -> int:
        """Let an attached turn go on behind `copy`; where its prefill begins."""
        await self.engine.write_pages(self._pages[name][: len(copy.pages)], [memoryview(row) for row in copy.pages])
        state = None if stateless else msgspec.msgpack.decode(copy.state, type=SessionState)
        return await self.engine.resume(name, copy.length, state)

    def _open(self, prompt: Ids, sampling: Sampling) -> str:
        """Attach a turn, with pages of its own."""
        self._count += 1
        name = f"turn-{self._count}"
        count = self.engine.layout.pages_for(len(prompt) + sampling.max_tokens + self.engine.layout.overrun_tokens)
        self._pages[name], self._free = self._free[:count], self._free[count:]
        self.engine.attach(Turn(id=name, prompt=Prompt(ids=prompt), sampling=sampling), self._pages[name])
        return name

    def _close(self, name: str) -> None:
        """Forget a turn. Its pages come last, so that the next turn has others."""
        self.engine.detach(name)
        self._free += self._pages.pop(name)


def fork(engine: ReferenceEngine, source: str, target: str) -> int:
    """Give the attached turn `target`, which has no positions, all that `source` has computed; their number.

    Unlike a resume it works in the midst of a replayed prefill, where the decoder has not run yet.
    """
    old, new = engine._turns[source], engine._turns[target]
    count = -(-old.cache.length // PAGE_TOKENS)
    engine.pool.pages[new.table.pages[:count]] = engine.pool.pages[old.table.pages[:count]]
    new.cache.load_state(old.cache.ids, old.cache.read_state())
    for mark in ("decoded", "kept", "stream_tail"):
        setattr(new.cache, mark, getattr(old.cache, mark))
    return old.cache.length

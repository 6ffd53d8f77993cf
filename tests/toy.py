"""A small engine over real page memory, whose next token hangs on every byte that it should have read.

A position leaves a row in its page, and every second one a row of the pair, as compressed caches do. Rows are hashes of
the last tokens (the window, which is the state), the tenant's salt and the pictures; the next token is a hash of all
rows up to the turn's length, read through its page table, and of the window. So a foreign, stale or missing row, or the
state of another prefix, changes the tokens. The window is exact after replaying it, hence tokens are those of a cold
run in every mode.
"""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from dsuf.errors import CheckpointError, ContextTooLong, EngineFailed, QueueFull
from dsuf.types import (
    CacheLayout,
    EngineFacts,
    Finish,
    PrefillRange,
    Prompt,
    Sampling,
    SessionState,
    Span,
    StepPlan,
    StepResult,
    Turn,
)

WINDOW = 6
ROW = 8
EOS = 0

T = TypeVar("T")


def make_turn(
    name: str, ids: Sequence[int], *, max_tokens: int = 8, salt: str = "", spans: tuple[Span, ...] = (),
    temperature: float = 0.0, seed: int = 0, tenant: str = "", priority: int = 0, timeout_s: float | None = None,
) -> Turn:  # fmt: skip
    """A turn over `ids`."""
    sampling = Sampling(temperature=temperature, top_p=1.0, seed=seed, max_tokens=max_tokens)
    prompt = Prompt(ids=tuple(ids), spans=spans, salt=salt)
    return Turn(id=name, prompt=prompt, sampling=sampling, tenant=tenant, priority=priority, timeout_s=timeout_s)


def digest(*parts: object) -> bytes:
    """Eight bytes that hang on every one of `parts`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=ROW).digest()


class _Held:
    """A turn in the engine: the tokens in its cache, the one that waits to be fed, and from where rows are written."""

    def __init__(self, turn: Turn, pages: Sequence[int]) -> None:
        self.turn, self.pages = turn, tuple(pages)
        self.fed: list[int] = []
        self.window_start = 0
        self.kept = 0
        self.waiting: int | None = None
        self.generated = 0
        self.finish: Finish | None = None

    @property
    def window(self) -> list[int]:
        """The last tokens, as far as they are known since the window was cut."""
        return self.fed[max(self.window_start, len(self.fed) - WINDOW) :]

    def seen(self, position: int) -> list[Span]:
        """The pictures that reach to `position` or end before it."""
        return [span for span in self.turn.prompt.spans if span.start <= position]


class ToyEngine:
    """Implements `Engine`. `violations` lists what a caller did that could have given somebody foreign rows.

    With `replay_tokens` (0 or at least `WINDOW`) it prefills as in replay mode: no state in the midst of a prompt.
    `before` is asked with the name of each call that takes time: the seconds that it takes, or it raises. `step_s` is
    asked with the plan. A call that its caller gave up takes effect nevertheless, in its turn.
    """

    def __init__(
        self, *, pages: int = 64, page_tokens: int = 8, max_turns: int = 4, context_tokens: int = 4096,
        replay_tokens: int = 0, spare: int = 3, max_drafts: int = 3, vocabulary: int = 997, stop_every: int = 0,
        fingerprint: str = "toy",
    ) -> None:  # fmt: skip
        page_bytes = ROW * (page_tokens + page_tokens // 2)
        self.layout = CacheLayout(
            fingerprint=f"{fingerprint}-{replay_tokens}", page_tokens=page_tokens, page_bytes=page_bytes, pages=pages,
            state_bytes=8 * (WINDOW + spare + 1), overrun_tokens=max_drafts, replay_tokens=replay_tokens,
        )  # fmt: skip
        self.facts = EngineFacts(
            name="toy", device="none", context_tokens=context_tokens, max_turns=max_turns, vocabulary=vocabulary,
            eos_id=EOS, max_drafts=max_drafts,
        )  # fmt: skip
        self.memory = bytearray(b"\xa5" * (pages * page_bytes))
        self.violations: list[str] = []
        self.before: Callable[[str], float] = lambda name: 0.0
        self.step_s: Callable[[StepPlan], float] = lambda plan: 0.0
        self._spare, self._stop_every = spare, stop_every
        self._turns: dict[str, _Held] = {}
        self._under_way: list[frozenset[str]] = []
        self._order = asyncio.Lock()

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Hold `turn`; raises `QueueFull` or `ContextTooLong`."""
        wanted = len(turn.prompt.ids) + turn.sampling.max_tokens
        if wanted > self.facts.context_tokens or self.layout.pages_for(wanted) > len(pages):
            raise ContextTooLong(f"{wanted} tokens do not fit {len(pages)} pages")
        if len(self._turns) >= self.facts.max_turns:
            raise QueueFull("all places are taken", retry_after_s=1)
        if turn.id in self._turns or len(set(pages)) < len(pages) or not set(pages) <= set(range(self.layout.pages)):
            self.violations.append(f"attach {turn.id}: in use already, or pages {pages}")
        self._turns[turn.id] = _Held(turn, pages)

    def resume(self, turn: str, length: int, state: SessionState | None) -> Coroutine[Any, Any, int]:
        """Take over `length` positions; raises `CheckpointError`."""
        held = self._held(turn)
        return self._run("resume", lambda: self._resume(held, length, state))

    def step(self, plan: StepPlan) -> Coroutine[Any, Any, list[StepResult]]:
        """Run `plan`."""
        names = frozenset((*plan.decode, *(part.turn for part in plan.prefill)))
        self._under_way.append(names)
        end = lambda: self._under_way.remove(names)  # noqa: E731
        return self._run("step", lambda: self.compute(plan), self.step_s(plan), end)

    def compute(self, plan: StepPlan) -> list[StepResult]:
        """Run `plan` here and now."""
        going = [held for held in map(self._held, plan.decode) if held.finish is None]
        decoded = [self._decode(held, plan.drafts) for held in going]
        return decoded + [self._prefill(self._held(part.turn), part) for part in plan.prefill]

    def detach(self, turn: str) -> None:
        """Forget `turn`."""
        if any(turn in names for names in self._under_way):
            self.violations.append(f"detach {turn}: a step that names it is under way")
        self._turns.pop(turn, None)

    def read_state(self, turn: str) -> Coroutine[Any, Any, SessionState | None]:
        """The window of `turn`, with the tokens that it can spare."""
        held = self._held(turn)
        return self._run("read_state", lambda: self._state(held))

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Copy pages out."""

        def copy() -> None:
            for page, buffer in zip(pages, into, strict=True):
                buffer[:] = self._page(page)

        return self._run("read_pages", copy)

    def write_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Copy pages in."""
        first = [self._holders(page) for page in pages]

        def copy() -> None:
            for page, buffer, before in zip(pages, rows, first, strict=True):
                holders = self._holders(page)
                if len(holders) > 1 or set(holders) - set(before):
                    self.violations.append(f"write_pages {page}: in the tables of {holders}, then {before}")
                self._page(page)[:] = buffer

        return self._run("write_pages", copy)

    def counters(self) -> Mapping[str, int]:
        """Turns."""
        return {"turns": len(self._turns)}

    async def close(self) -> None:
        """Forget everything after what is under way."""
        await self._run("close", self._turns.clear)

    def cold_tokens(self, turn: Turn) -> list[int]:
        """What `turn` gives in an engine of its own, where everything is computed."""
        alone = ToyEngine(
            pages=self.layout.pages_for(len(turn.prompt.ids) + turn.sampling.max_tokens) + 1,
            page_tokens=self.layout.page_tokens, context_tokens=self.facts.context_tokens,
            vocabulary=self.facts.vocabulary, stop_every=self._stop_every, max_drafts=0,
        )  # fmt: skip
        alone.attach(turn, range(alone.layout.pages))
        [result] = alone.compute(StepPlan(prefill=(PrefillRange(turn.id, 0, len(turn.prompt.ids)),)))
        ids = list(result.ids)
        while result.finish is None:
            [result] = alone.compute(StepPlan(decode=(turn.id,)))
            ids += result.ids
        return ids

    def _run(
        self, name: str, work: Callable[[], T], seconds: float = 0.0, end: Callable[[], None] = lambda: None
    ) -> Coroutine[Any, Any, T]:
        """Begin `work` in the order of calls, now, whether or not anybody waits for it; its result is for later."""

        async def in_order() -> T:
            try:
                async with self._order:
                    await asyncio.sleep(seconds + self.before(name))
                    return work()
            finally:
                end()

        async def result(call: asyncio.Future[T]) -> T:
            return await asyncio.shield(call)

        call = asyncio.ensure_future(in_order())
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return result(call)

    def _holders(self, page: int) -> list[str]:
        """The turns that have `page`."""
        return [name for name, held in self._turns.items() if page in held.pages]

    def _held(self, turn: str) -> _Held:
        try:
            return self._turns[turn]
        except KeyError:
            raise EngineFailed(f"{turn} is not attached") from None

    def _resume(self, held: _Held, length: int, state: SessionState | None) -> int:
        prompt = held.turn.prompt.ids
        if held.fed or not 0 < length <= len(prompt):
            raise CheckpointError(f"{held.turn.id} cannot go on at {length}")
        if state is None:
            if not self.layout.replay_tokens:
                raise CheckpointError("no state")
            start = max(0, length - self.layout.replay_tokens)
            held.fed, held.window_start, held.kept = list(prompt[:start]), start, length
            return start
        again = state.repeats and state.length == len(prompt) == length + 1
        if state.fingerprint != self.layout.fingerprint or not (0 <= state.length - length <= state.spare or again):
            raise CheckpointError(f"a state of {state.fingerprint} at {state.length} for {length}")
        window = list(struct.unpack(f"<{len(state.payload) // 8}q", state.payload))
        ids = struct.unpack(f"<{state.length}q", state.ids)
        if ids[:length] != prompt[:length]:
            raise CheckpointError("the state of another prompt")
        del window[len(window) - (state.length - length) :]
        held.fed, held.window_start = [*prompt[: length - len(window)], *window], length - len(window)
        return length

    def _state(self, held: _Held) -> SessionState | None:
        length = len(held.fed)
        if self.layout.replay_tokens and length < len(held.turn.prompt.ids):
            return None
        window = held.fed[max(held.window_start, length - WINDOW - max(1, self._spare)) :]
        return SessionState(
            fingerprint=self.layout.fingerprint, length=length, ids=struct.pack(f"<{length}q", *held.fed),
            payload=struct.pack(f"<{len(window)}q", *window), spare=max(0, min(self._spare, len(window) - WINDOW)),
            repeats=length > 0 and len(window) > min(WINDOW, length - 1),
        )  # fmt: skip

    def _prefill(self, held: _Held, part: PrefillRange) -> StepResult:
        prompt = held.turn.prompt.ids
        if part.start != len(held.fed) or not part.start < part.stop <= len(prompt):
            raise EngineFailed(f"prefill {part.start} to {part.stop} after {len(held.fed)} positions")
        for token in prompt[part.start : part.stop]:
            self._feed(held, token)
        if part.stop < len(prompt):
            return StepResult(turn=part.turn, prefilled=part.stop)
        return self._give(held, [self._next(held)], 0)

    def _decode(self, held: _Held, drafts: int) -> StepResult:
        """One token, and as many more as a hash lets drafts be right; the wrong ones leave rows behind the end."""
        if held.waiting is None:
            raise EngineFailed(f"{held.turn.id} decodes before the end of its prompt")
        right = int.from_bytes(digest("right", held.fed[-WINDOW:]), "little") % (drafts + 1)
        ids: list[int] = []
        for _ in range(right + 1):
            self._feed(held, held.waiting)
            held.waiting = self._next(held)
            ids.append(held.waiting)
            if held.waiting == EOS or held.generated + len(ids) == held.turn.sampling.max_tokens:
                break
        for wrong in range(right + 1, drafts + 1):
            self._write(held, len(held.fed) + wrong - right - 1, digest("rejected", wrong))
        return self._give(held, ids, drafts)

    def _give(self, held: _Held, ids: list[int], drafted: int) -> StepResult:
        held.waiting = ids[-1]
        given = ids[:-1] if ids[-1] == EOS else ids
        held.generated += len(given)
        if ids[-1] == EOS:
            held.finish = "stop"
        elif held.generated == held.turn.sampling.max_tokens:
            held.finish = "length"
        return StepResult(
            turn=held.turn.id, ids=tuple(given), prefilled=len(held.turn.prompt.ids), drafted=drafted,
            accepted=min(len(given), len(ids) - 1), finish=held.finish,
        )  # fmt: skip

    def _feed(self, held: _Held, token: int) -> None:
        """Add a position: its row, and that of a pair which it completes, unless they were taken over."""
        position = len(held.fed)
        held.fed.append(token)
        if position < held.kept:
            return
        self._write(held, position, digest(position, held.window, held.turn.prompt.salt, held.seen(position)))
        if position % 2:
            pair, page = position // 2, position // self.layout.page_tokens
            start = ROW * (self.layout.page_tokens + pair % (self.layout.page_tokens // 2))
            self._page(held.pages[page])[start : start + ROW] = digest("pair", held.fed[-2:])

    def _write(self, held: _Held, position: int, row: bytes) -> None:
        """Put the row of `position` where the turn's table says."""
        page = held.pages[position // self.layout.page_tokens]
        others = [name for name, other in self._turns.items() if other is not held and page in other.pages]
        if others:
            self.violations.append(f"{held.turn.id} writes position {position} to page {page} of {others}")
        start = ROW * (position % self.layout.page_tokens)
        self._page(page)[start : start + ROW] = row

    def _next(self, held: _Held) -> int:
        """The next token: a hash of all rows and the window, and of seed and position where it is sampled."""
        size, length, state = self.layout.page_tokens, len(held.fed), hashlib.blake2b(digest_size=ROW)
        for page in range(self.layout.pages_for(length)):
            rows = min(size, length - page * size)
            memory = self._page(held.pages[page])
            state.update(memory[: ROW * rows])
            state.update(memory[ROW * size : ROW * (size + rows // 2)])
        sampling = held.turn.sampling
        state.update(digest(held.window, (sampling.seed, length) if sampling.temperature else None))
        drawn = int.from_bytes(state.digest(), "little")
        if self._stop_every and drawn % self._stop_every == 0:
            return EOS
        return 1 + drawn // 256 % (self.facts.vocabulary - 1)

    def _page(self, page: int) -> memoryview:
        return memoryview(self.memory)[page * self.layout.page_bytes : (page + 1) * self.layout.page_bytes]

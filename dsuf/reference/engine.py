"""The reference model behind the engine protocol: plans in, tokens out, on one worker thread.

Every call that computes or copies is queued for the worker when it is made, awaited or not, so calls take effect in the
order in which they are made. A turn's last token is chosen but not yet in its cache; the next decode step feeds it.
"""

import asyncio
import platform
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from dsuf.checkpoint.fingerprint import fingerprint
from dsuf.errors import CheckpointError, ContextTooLong, EngineFailed, QueueFull
from dsuf.reference.arithmetic import F32, I64, OFFICIAL, Arithmetic
from dsuf.reference.cache import SequenceCache
from dsuf.reference.loader import load_draft, load_model
from dsuf.reference.logprobs import rate
from dsuf.reference.masking import Masking
from dsuf.reference.model import Model, Output, PrefillMode
from dsuf.reference.pages import PAGE_TOKENS, PagePool, PageTable
from dsuf.reference.sampler import choose
from dsuf.reference.speculate import Anchor, Drafter, HeadDrafter, Speculation, speculate
from dsuf.types import (
    CacheLayout,
    EngineFacts,
    Finish,
    Logprob,
    OpenMask,
    PrefillRange,
    SessionState,
    StepPlan,
    StepResult,
    Turn,
)  # fmt: skip

LAYOUT = "reference-3"
"""Names the arrangement of pages and states; part of their fingerprint."""

_NEAR = 16
"""A state behind a replay can do without so small a part of the window."""
_ID = np.dtype("<i8")
_T = TypeVar("_T")


class _Attached:
    """A turn with its pages and cache, the token that waits to be fed, and how many tokens were generated."""

    def __init__(self, turn: Turn, table: PageTable, cache: SequenceCache) -> None:
        self.turn, self.table, self.cache = turn, table, cache
        self.ids = np.array(turn.prompt.ids, np.int64)
        self.masking: Masking | None = None
        self.waiting = -1
        self.generated = 0
        self.ended = False


class ReferenceEngine:
    """`dsuf.types.Engine` on the CPU. `prefill` chooses between the exact and the replayed prefill.

    Without a number of `pages` there are enough for `max_turns` whole contexts and one more.
    """

    def __init__(
        self, model: Model, name: str, weights: str, *, context_tokens: int, max_turns: int, prefill: PrefillMode,
        pages: int | None = None, drafter: Drafter | None = None, speculation: Speculation | None = None,
        open_mask: OpenMask | None = None,
    ) -> None:  # fmt: skip
        self.model, self.prefill = model, prefill
        self.drafter, self.speculation = drafter, speculation or Speculation()
        self.open_mask = open_mask
        self.facts = EngineFacts(
            name=name,
            device=f"CPU, NumPy {np.__version__}, {platform.machine()}",
            context_tokens=min(context_tokens, model.config.max_seq_len),
            max_turns=max_turns,
            vocabulary=model.config.vocab_size,
            eos_id=model.config.eos_token_id,
            max_drafts=model.config.dspark_block_size if drafter else 0,
            constrains=open_mask is not None,
            logprobs=True,
        )
        overrun_tokens = max(0, self.facts.max_drafts - 1)  # behind the token that ends the turn
        whole = -(-(self.facts.context_tokens + overrun_tokens) // PAGE_TOKENS)
        self.pool = PagePool(model.config, model.arithmetic, (max_turns + 1) * whole if pages is None else pages)
        self.layout = CacheLayout(
            fingerprint=f"{weights}-{LAYOUT}-{model.arithmetic.name}-{prefill}",
            page_tokens=PAGE_TOKENS,
            page_bytes=self.pool.page_bytes,
            pages=len(self.pool.pages),
            state_bytes=model.new_cache().state_bytes,
            overrun_tokens=overrun_tokens,
            replay_tokens=model.config.window_size if prefill == "replay" else 0,
        )
        self._turns: dict[str, _Attached] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reference-engine")

    @classmethod
    def load(
        cls, directory: Path, *, context_tokens: int, max_turns: int, prefill: PrefillMode = "replay",
        pages: int | None = None, arithmetic: Arithmetic = OFFICIAL, speculation: Speculation | None = None,
        open_mask: OpenMask | None = None, progress: Callable[[int], None] = lambda layer: None,
    ) -> Self:  # fmt: skip
        """Load the checkpoint in `directory`, with its draft head if there is a `speculation`; blocks.

        Raises `CheckpointError`.
        """
        model = load_model(directory, arithmetic, progress=progress)
        return cls(
            model, "reference", fingerprint(directory), context_tokens=context_tokens, max_turns=max_turns,
            prefill=prefill, pages=pages, drafter=HeadDrafter(load_draft(directory, model)) if speculation else None,
            speculation=speculation, open_mask=open_mask,
        )  # fmt: skip

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Reserve a place for `turn`, its rows in `pages`; raises `ContextTooLong` or `QueueFull`."""
        prompt, generated = len(turn.prompt.ids), turn.sampling.max_tokens
        wanted = f"{prompt} in the prompt and {generated} to generate make {prompt + generated}."
        if prompt + generated > self.facts.context_tokens:
            raise ContextTooLong(f"This model's maximum context length is {self.facts.context_tokens} tokens; {wanted}")
        if len(pages) < self.layout.pages_for(prompt + generated + self.layout.overrun_tokens):
            raise ContextTooLong(f"{len(pages)} pages hold {len(pages) * PAGE_TOKENS} tokens; {wanted}")
        if len(self._turns) >= self.facts.max_turns:
            raise QueueFull(f"All {self.facts.max_turns} places are taken.", retry_after_s=1)
        table = PageTable(self.pool, pages)
        self._turns[turn.id] = _Attached(turn, table, self.model.new_cache(table))
        self._turns[turn.id].masking = self._open_masking(turn)

    def detach(self, turn: str) -> None:
        """Forget `turn` and its cache; unknown turns are ignored."""
        self._turns.pop(turn, None)

    def resume(self, turn: str, length: int, state: SessionState | None) -> Coroutine[Any, Any, int]:
        """Let an attached turn go on behind `length` positions, see `take_over`; raises `CheckpointError`."""
        return self._queue(self.take_over, self._attached(turn), length, state)

    def step(self, plan: StepPlan) -> Coroutine[Any, Any, list[StepResult]]:
        """Run `plan` on the worker thread; raises `EngineFailed` for a plan that cannot be run."""
        return self._queue(self.run, plan)

    def read_state(self, turn: str) -> Coroutine[Any, Any, SessionState | None]:
        """The state of an attached turn behind the steps that were launched before; None in the midst of a replay."""
        return self._queue(self.copy_state, self._attached(turn))

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Copy `pages` out, each into its buffer; raises `ValueError` for a buffer that is not of a page's size."""
        return self._queue(self._each_page, self.pool.read, pages, into)

    def write_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Fill `pages`, each from its buffer; raises `ValueError` for a buffer that is not of a page's size."""
        return self._queue(self._each_page, self.pool.write, pages, rows)

    def _queue(self, function: Callable[..., _T], *arguments: object) -> Coroutine[Any, Any, _T]:
        """Put a call behind the worker's others now; the result is for later."""
        return _result(asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments))

    def _each_page(
        self, copy: Callable[[int, memoryview], None], pages: Sequence[int], buffers: Sequence[memoryview]
    ) -> None:
        for page, buffer in zip(pages, buffers, strict=True):
            copy(page, buffer)

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Run `plan` here and now: all decode turns as one batch, then each prefill range."""
        if plan.drafts > self.facts.max_drafts:
            raise EngineFailed(f"The plan asks for {plan.drafts} drafts, this engine verifies {self.facts.max_drafts}.")
        decoding = [turn for turn in map(self._attached, plan.decode) if not turn.ended]
        if early := [turn.turn.id for turn in decoding if turn.waiting < 0]:
            raise EngineFailed(f"The plan decodes {', '.join(early)} before the end of the prompt.")
        done = self._speculate(decoding, plan.drafts) if plan.drafts else self._decode(decoding)
        return done + [self._prefill(part) for part in plan.prefill]

    def copy_state(self, attached: _Attached) -> SessionState | None:
        """The state of a turn, here and now."""
        cache = attached.cache
        if cache.decoded < cache.length:
            return None
        return SessionState(
            fingerprint=self.layout.fingerprint, length=cache.length, ids=cache.ids.astype(_ID).tobytes(),
            payload=cache.read_state(), spare=cache.spare, near=self._near(cache), repeats=cache.slack > 0,
        )  # fmt: skip

    def take_over(self, attached: _Attached, length: int, state: SessionState | None) -> int:
        """Let a turn without positions go on behind the first `length` of its prompt, here and now.

        Returns where its prefill begins. Raises `CheckpointError` if the state does not fit, or if there is none and
        this engine needs one.
        """
        if attached.cache.length:
            raise EngineFailed(f"Turn {attached.turn.id} has {attached.cache.length} positions of its own.")
        if not 0 <= length < len(attached.ids):
            raise CheckpointError(f"a prompt of {len(attached.ids)} positions cannot go on behind {length}")
        cache = self.model.new_cache(attached.table)
        if state is not None:
            self._load_state(cache, attached.ids, length, state)
        elif self.layout.replay_tokens or length == 0:
            cache.begin_at(attached.ids[: max(0, length - self.layout.replay_tokens)], length)
        else:
            raise CheckpointError("an exact prefill goes on from a state only")
        attached.cache = cache
        return cache.length

    def _load_state(self, cache: SequenceCache, prompt: I64, length: int, state: SessionState) -> None:
        """Fill `cache` from `state` and cut it to `length`; raises `CheckpointError`."""
        if state.fingerprint != self.layout.fingerprint:
            raise CheckpointError(
                f"the state is of {state.fingerprint}, this engine's are of {self.layout.fingerprint}"
            )
        if len(state.ids) != state.length * _ID.itemsize:
            raise CheckpointError(f"a state of {state.length} positions has {len(state.ids)} bytes of ids")
        ids = np.frombuffer(state.ids, _ID).astype(np.int64)
        if length > state.length or not np.array_equal(ids[:length], prompt[:length]):
            raise CheckpointError(f"a state of {state.length} positions is of another prompt than the first {length}")
        cache.load_state(ids, state.payload)
        repeats = state.length == len(prompt) and cache.slack > 0
        if state.length - length > max(cache.spare, self._near(cache), int(repeats)):
            raise CheckpointError(f"a state of {state.length} positions cannot be cut to {length}")
        cache.truncate(length)

    def _near(self, cache: SequenceCache) -> int:
        """How many of the last positions a prompt may leave off that goes on with replayed windows in any case.

        Its first rows then find so many less in the windows, hence few.
        """
        return min(cache.slack, -(-self.layout.replay_tokens // _NEAR))

    def counters(self) -> Mapping[str, int]:
        """Attached turns, and the bytes that are theirs beside those of pages."""
        held = [attached.cache.held_bytes() for attached in self._turns.values()]
        return {"turns": len(held), "cache_bytes": sum(held)}

    async def close(self) -> None:
        """Wait for the calls that were made and forget everything."""
        await asyncio.to_thread(self._worker.shutdown)
        self._turns.clear()

    def _attached(self, turn: str) -> _Attached:
        try:
            return self._turns[turn]
        except KeyError:
            raise EngineFailed(f"Turn {turn} is not attached.") from None

    def _open_masking(self, turn: Turn) -> Masking | None:
        """The mask of `turn`, if it has a constraint; raises `EngineFailed` where this engine keeps to none."""
        if turn.constraint is None:
            return None
        if self.open_mask is None:
            raise EngineFailed("This engine does not keep to constraints.")
        return Masking(self.open_mask(turn.constraint), turn.prompt.ids[len(turn.prompt.ids) - turn.constraint.spent :])

    def _decode(self, turns: list[_Attached]) -> list[StepResult]:
        """One token for each turn."""
        if not turns:
            return []
        for turn in turns:
            if turn.masking is not None:
                turn.masking.ask()
        output = self.model.forward([(turn.cache, np.array([turn.waiting])) for turn in turns])
        logits = self.model.logits(output, slice(None))
        for row, turn in enumerate(turns):
            self._feed(turn, output.taps[row : row + 1])
        return [self._choose(turn, row) for turn, row in zip(turns, logits, strict=True)]

    def _speculate(self, turns: list[_Attached], drafts: int) -> list[StepResult]:
        """One round of drafts for each turn."""
        if not turns or self.drafter is None:
            return []
        anchors = [Anchor(turn.cache, turn.waiting, turn.turn.sampling, turn.masking) for turn in turns]
        rounds = speculate(self.model, self.drafter, anchors, drafts, self.speculation)
        return [
            self._take(turn, done.ids, done.verified, done.logprobs) for turn, done in zip(turns, rounds, strict=True)
        ]

    def _prefill(self, part: PrefillRange) -> StepResult:
        turn = self._attached(part.turn)
        if part.start != turn.cache.length or not part.start < part.stop <= len(turn.ids):
            raise EngineFailed(f"The plan prefills {part.start} to {part.stop} after {turn.cache.length} positions.")
        last = part.stop == len(turn.ids)
        if last and turn.masking is not None:
            turn.masking.ask()
        output = self._prefill_output(turn, part, last=last)
        if output is not None:
            self._feed(turn, output.taps)
        if output is None or not last:
            return StepResult(turn=part.turn, prefilled=part.stop)
        return self._choose(turn, self.model.logits(output, slice(-1, None))[0])

    def _prefill_output(self, turn: _Attached, part: PrefillRange, *, last: bool) -> Output | None:
        ids = turn.ids[part.start : part.stop]
        if self.prefill == "replay":
            return self.model.prefill_replay(turn.cache, ids, last=last)
        return self.model.forward([(turn.cache, ids)])

    def _feed(self, turn: _Attached, taps: F32) -> None:
        """Tell the drafter of the last positions in the cache, even if this plan drafts nothing: the next one may."""
        if self.drafter is not None:
            self.drafter.feed(turn.cache, turn.cache.length - len(taps), taps)

    def _choose(self, turn: _Attached, logits: F32) -> StepResult:
        """Take the next token of `turn` from its `logits`."""
        allowed = logits
        if turn.masking is not None:
            turn.masking.apply(allowed := logits[None].copy())
            allowed = allowed[0]
        ids = (choose(allowed, turn.turn.sampling, turn.cache.length),)
        return self._take(turn, ids, 0, rate(logits[None], ids, turn.turn.sampling.logprobs))

    def _take(
        self, turn: _Attached, ids: tuple[int, ...], drafted: int, logprobs: tuple[Logprob, ...]
    ) -> StepResult:  # fmt: skip
        """Hand out `ids` up to the end of the turn. The end-of-sentence token ends it and is not handed out.

        The cache is cut to what was handed out: a round may have gone beyond the end.
        """
        room = turn.turn.sampling.max_tokens - turn.generated
        given = ids[: ids.index(self.facts.eos_id)] if self.facts.eos_id in ids[:room] else ids[:room]
        finish: Finish | None = "stop" if len(given) < min(len(ids), room) else None
        if finish is None and len(given) == room:
            finish = "length"
        turn.generated += len(given)
        if turn.masking is not None:
            turn.masking.take(given)
        turn.waiting, turn.ended = ids[-1], finish is not None
        if len(given) < len(ids):
            turn.cache.truncate(len(turn.ids) + turn.generated)
        return StepResult(
            turn=turn.turn.id, ids=given, prefilled=len(turn.ids), drafted=drafted,
            accepted=min(len(given), len(ids) - 1), logprobs=logprobs[: len(given)], finish=finish,
            fault=turn.masking.find_fault(len(given)) if turn.masking is not None and finish == "stop" else None,
        )  # fmt: skip


async def _result(future: asyncio.Future[_T]) -> _T:
    """What a queued call gives. It is carried out even if nobody waits any more."""
    return await asyncio.shield(future)

"""The reference model behind the engine protocol: plans in, tokens out, on one worker thread.

A turn's last token is chosen but not yet in its cache; the next decode step feeds it.
"""

import asyncio
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from dsuf.checkpoint.fingerprint import fingerprint
from dsuf.errors import CheckpointError, ContextTooLong, EngineFailed, QueueFull
from dsuf.reference.arithmetic import F32, OFFICIAL, Arithmetic
from dsuf.reference.cache import SequenceCache
from dsuf.reference.loader import load_draft, load_model
from dsuf.reference.model import Model, Output, PrefillMode
from dsuf.reference.sampler import choose
from dsuf.reference.speculate import Anchor, Drafter, HeadDrafter, Speculation, speculate
from dsuf.types import EngineFacts, Finish, PrefillRange, SessionCache, StepPlan, StepResult, Turn

LAYOUT = "reference-2"
"""Names the arrangement of an exported cache; part of its fingerprint."""

_ID = np.dtype("<i8")


class _Attached:
    """A turn with its cache, the token that waits to be fed, and how many tokens were generated."""

    def __init__(self, turn: Turn, cache: SequenceCache) -> None:
        self.turn, self.cache = turn, cache
        self.ids = np.array(turn.prompt.ids, np.int64)
        self.waiting = -1
        self.generated = 0


class ReferenceEngine:
    """`dsuf.types.Engine` on the CPU. `prefill` chooses between the exact and the replayed prefill."""

    def __init__(
        self, model: Model, name: str, weights: str, *, context_tokens: int, max_turns: int, prefill: PrefillMode,
        drafter: Drafter | None = None, speculation: Speculation | None = None,
    ) -> None:  # fmt: skip
        self.model, self.prefill = model, prefill
        self.drafter, self.speculation = drafter, speculation or Speculation()
        self.fingerprint = f"{weights}-{LAYOUT}-{model.arithmetic.name}-{prefill}"
        self.facts = EngineFacts(
            name=name,
            device=f"CPU, NumPy {np.__version__}, {platform.machine()}",
            context_tokens=min(context_tokens, model.config.max_seq_len),
            max_turns=max_turns,
            vocabulary=model.config.vocab_size,
            eos_id=model.config.eos_token_id,
            max_drafts=model.config.dspark_block_size if drafter else 0,
        )
        self._turns: dict[str, _Attached] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reference-engine")

    @classmethod
    def load(
        cls, directory: Path, *, context_tokens: int, max_turns: int, prefill: PrefillMode = "replay",
        arithmetic: Arithmetic = OFFICIAL, speculation: Speculation | None = None,
        progress: Callable[[int], None] = lambda layer: None,
    ) -> Self:  # fmt: skip
        """Load the checkpoint in `directory`, with its draft head if there is a `speculation`; blocks.

        Raises `CheckpointError`.
        """
        model = load_model(directory, arithmetic, progress=progress)
        return cls(
            model, "reference", fingerprint(directory), context_tokens=context_tokens, max_turns=max_turns,
            prefill=prefill, drafter=HeadDrafter(load_draft(directory, model)) if speculation else None,
            speculation=speculation,
        )  # fmt: skip

    def attach(self, turn: Turn) -> None:
        """Reserve a place for `turn`; raises `ContextTooLong` or `QueueFull`."""
        wanted = len(turn.prompt.ids) + turn.sampling.max_tokens
        if wanted > self.facts.context_tokens:
            raise ContextTooLong(
                f"This model's maximum context length is {self.facts.context_tokens} tokens; "
                f"{len(turn.prompt.ids)} in the prompt and {turn.sampling.max_tokens} to generate make {wanted}."
            )
        if len(self._turns) >= self.facts.max_turns:
            raise QueueFull(f"All {self.facts.max_turns} places are taken.", retry_after_s=1)
        self._turns[turn.id] = _Attached(turn, self.model.new_cache())

    def detach(self, turn: str) -> None:
        """Forget `turn` and its cache; unknown turns are ignored."""
        self._turns.pop(turn, None)

    async def step(self, plan: StepPlan) -> list[StepResult]:
        """Run `plan` on the worker thread; raises `EngineFailed` for a plan that cannot be run."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self.run, plan)

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Run `plan` here and now: all decode turns as one batch, then each prefill range."""
        if plan.drafts > self.facts.max_drafts:
            raise EngineFailed(f"The plan asks for {plan.drafts} drafts, this engine verifies {self.facts.max_drafts}.")
        decoding = [self._attached(turn) for turn in plan.decode]
        done = self._speculate(decoding, plan.drafts) if plan.drafts else self._decode(decoding)
        return done + [self._prefill(part) for part in plan.prefill]

    async def export_session(self, turn: str) -> SessionCache:
        """Copy out the cache of an attached turn on the worker thread, hence between steps."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self.copy_out, turn)

    def copy_out(self, turn: str) -> SessionCache:
        """The cache of an attached turn, here and now.

        What a replay cut off is the same only for a prompt that ends where it did, hence positions before it are spared
        to nobody else.
        """
        cache = self._attached(turn).cache
        return SessionCache(
            fingerprint=self.fingerprint, length=cache.length, ids=cache.ids[: cache.length].astype(_ID).tobytes(),
            parts=dict(cache.export_parts()), spare=max(0, min(cache.slack, cache.length - cache.replayed)),
            repeats=cache.slack > 0,
        )  # fmt: skip

    async def import_session(self, turn: str, cache: SessionCache, length: int) -> None:
        """Fill the cache of an attached turn whose prompt begins with the first `length` positions of `cache`; raises
        `CheckpointError`."""
        fresh = await asyncio.get_running_loop().run_in_executor(self._worker, self.copy_in, cache, length)
        self._attached(turn).cache = fresh

    def copy_in(self, cache: SessionCache, length: int) -> SequenceCache:
        """The first `length` positions of `cache` as a cache of this model; raises `CheckpointError`."""
        if cache.fingerprint != self.fingerprint:
            raise CheckpointError(f"the cache is of {cache.fingerprint}, this engine's are of {self.fingerprint}")
        if len(cache.ids) != cache.length * _ID.itemsize:
            raise CheckpointError(f"a session's cache of {cache.length} positions has {len(cache.ids)} bytes of ids")
        fresh = self.model.new_cache()
        fresh.import_parts(np.frombuffer(cache.ids, _ID).astype(np.int64), cache.parts)
        if length < cache.length:
            if cache.length - length > fresh.slack:
                raise CheckpointError(f"a session's cache of {cache.length} positions cannot be cut to {length}")
            fresh.truncate(length)
        return fresh

    def counters(self) -> Mapping[str, int]:
        """Attached turns and the bytes that their caches hold."""
        held = [attached.cache.held_bytes() for attached in self._turns.values()]
        return {"turns": len(held), "cache_bytes": sum(held)}

    async def close(self) -> None:
        """Wait for the running step and forget everything."""
        await asyncio.to_thread(self._worker.shutdown)
        self._turns.clear()

    def _attached(self, turn: str) -> _Attached:
        try:
            return self._turns[turn]
        except KeyError:
            raise EngineFailed(f"The plan names turn {turn}, which is not attached.") from None

    def _decode(self, turns: list[_Attached]) -> list[StepResult]:
        """One token for each turn."""
        if not turns:
            return []
        output = self.model.forward([(turn.cache, np.array([turn.waiting])) for turn in turns])
        logits = self.model.logits(output, slice(None))
        for row, turn in enumerate(turns):
            self._feed(turn, output.taps[row : row + 1])
        return [self._choose(turn, row) for turn, row in zip(turns, logits, strict=True)]

    def _speculate(self, turns: list[_Attached], drafts: int) -> list[StepResult]:
        """One round of drafts for each turn."""
        if not turns or self.drafter is None:
            return []
        anchors = [Anchor(turn.cache, turn.waiting, turn.turn.sampling) for turn in turns]
        rounds = speculate(self.model, self.drafter, anchors, drafts, self.speculation)
        return [self._take(turn, done.ids, done.verified) for turn, done in zip(turns, rounds, strict=True)]

    def _prefill(self, part: PrefillRange) -> StepResult:
        turn = self._attached(part.turn)
        if part.start != turn.cache.length or not part.start < part.stop <= len(turn.ids):
            raise EngineFailed(f"The plan prefills {part.start} to {part.stop} after {turn.cache.length} positions.")
        last = part.stop == len(turn.ids)
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
        return self._take(turn, (choose(logits, turn.turn.sampling, turn.cache.length),), 0)

    def _take(self, turn: _Attached, ids: tuple[int, ...], drafted: int) -> StepResult:
        """Hand out `ids` up to the end of the turn. The end-of-sentence token ends it and is not handed out.

        The cache is cut to what was handed out: a round may have gone beyond the end.
        """
        room = turn.turn.sampling.max_tokens - turn.generated
        given = ids[: ids.index(self.facts.eos_id)] if self.facts.eos_id in ids[:room] else ids[:room]
        finish: Finish | None = "stop" if len(given) < min(len(ids), room) else None
        if finish is None and len(given) == room:
            finish = "length"
        turn.generated += len(given)
        turn.waiting = ids[-1]
        if len(given) < len(ids):
            turn.cache.truncate(len(turn.ids) + turn.generated)
        return StepResult(
            turn=turn.turn.id, ids=given, prefilled=len(turn.ids), drafted=drafted,
            accepted=min(len(given), len(ids) - 1), finish=finish,
        )  # fmt: skip

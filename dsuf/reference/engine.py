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
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model, Output, PrefillMode
from dsuf.reference.sampler import choose
from dsuf.types import EngineFacts, Finish, PrefillRange, SessionCache, StepPlan, StepResult, Turn

LAYOUT = "reference-1"
"""Names the arrangement of an exported cache; part of its fingerprint."""


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
        self, model: Model, name: str, weights: str, *, context_tokens: int, max_turns: int, prefill: PrefillMode
    ) -> None:
        self.model, self.prefill = model, prefill
        self.fingerprint = f"{weights}-{LAYOUT}-{model.arithmetic.name}"
        self.facts = EngineFacts(
            name=name,
            device=f"CPU, NumPy {np.__version__}, {platform.machine()}",
            context_tokens=min(context_tokens, model.config.max_seq_len),
            max_turns=max_turns,
            vocabulary=model.config.vocab_size,
            eos_id=model.config.eos_token_id,
        )
        self._turns: dict[str, _Attached] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reference-engine")

    @classmethod
    def load(
        cls, directory: Path, *, context_tokens: int, max_turns: int, prefill: PrefillMode = "replay",
        arithmetic: Arithmetic = OFFICIAL, progress: Callable[[int], None] = lambda layer: None,
    ) -> Self:  # fmt: skip
        """Load the checkpoint in `directory`; blocks for as long as it takes. Raises `CheckpointError`."""
        model = load_model(directory, arithmetic, progress=progress)
        weights = fingerprint(directory)
        return cls(model, "reference", weights, context_tokens=context_tokens, max_turns=max_turns, prefill=prefill)

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
        if plan.drafts:
            raise EngineFailed("The reference engine verifies no drafts.")
        return self._decode([self._attached(turn) for turn in plan.decode]) + [self._prefill(r) for r in plan.prefill]

    def export_session(self, turn: str) -> SessionCache:
        """Copy out the cache of an attached turn whose prefill is complete; raises `CheckpointError` before that."""
        cache = self._attached(turn).cache
        if cache.decoded != cache.length:
            raise CheckpointError("a cache cannot be exported in the middle of a replayed prefill")
        return SessionCache(fingerprint=self.fingerprint, length=cache.length, parts=dict(cache.export_parts()))

    def import_session(self, turn: str, cache: SessionCache) -> None:
        """Fill the cache of an attached turn whose prompt begins with what is in `cache`; raises `CheckpointError`."""
        if cache.fingerprint != self.fingerprint:
            raise CheckpointError(f"the cache is of {cache.fingerprint}, this engine's are of {self.fingerprint}")
        fresh = self.model.new_cache()
        fresh.import_parts(cache.length, cache.parts)
        self._attached(turn).cache = fresh

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
        if not turns:
            return []
        output = self.model.forward([(turn.cache, np.array([turn.waiting])) for turn in turns])
        logits = self.model.logits(output, slice(None))
        return [self._choose(turn, row) for turn, row in zip(turns, logits, strict=True)]

    def _prefill(self, part: PrefillRange) -> StepResult:
        turn = self._attached(part.turn)
        if part.start != turn.cache.length or not part.start < part.stop <= len(turn.ids):
            raise EngineFailed(f"The plan prefills {part.start} to {part.stop} after {turn.cache.length} positions.")
        last = part.stop == len(turn.ids)
        output = self._prefill_output(turn, part, last=last)
        if output is None or not last:
            return StepResult(turn=part.turn, prefilled=part.stop)
        return self._choose(turn, self.model.logits(output, slice(-1, None))[0])

    def _prefill_output(self, turn: _Attached, part: PrefillRange, *, last: bool) -> Output | None:
        ids = turn.ids[part.start : part.stop]
        if self.prefill == "replay":
            return self.model.prefill_replay(turn.cache, ids, last=last)
        return self.model.forward([(turn.cache, ids)])

    def _choose(self, turn: _Attached, logits: F32) -> StepResult:
        """Take the next token of `turn`. The end-of-sentence token ends the turn and is not handed out."""
        name, prefilled = turn.turn.id, len(turn.ids)
        turn.waiting = choose(logits, turn.turn.sampling, turn.cache.length)
        if turn.waiting == self.facts.eos_id:
            return StepResult(turn=name, prefilled=prefilled, finish="stop")
        turn.generated += 1
        finish: Finish | None = "length" if turn.generated >= turn.turn.sampling.max_tokens else None
        return StepResult(turn=name, ids=(turn.waiting,), prefilled=prefilled, finish=finish)

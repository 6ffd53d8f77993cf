"""The CUDA engine behind the engine protocol: plans in, tokens out, nothing of the device on the event loop.

One thread launches, in the order of the calls; the loop polls pinned memory for what the device has written there.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from dsuf.checkpoint.fingerprint import fingerprint
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.launcher import Launched, Launcher, Outcome, Seat
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.prefill import PrefillMode
from dsuf.cuda.results import ENDED_BY_EOS
from dsuf.cuda.streams import wait_until
from dsuf.errors import ContextTooLong, DeviceError, EngineFailed, QueueFull
from dsuf.types import EngineFacts, Finish, StepPlan, StepResult, Turn

LAYOUT = "cuda-1"
"""Names the arrangement of caches that leave the device; part of their fingerprint."""

STEP_DEADLINE_S = 60.0
USUAL_SHARE = 0.2
"""How much the last step counts in what the next is expected to take."""


class CudaEngine:
    """`dsuf.types.Engine` on a GPU. `prefill` chooses between the exact and the replayed prefill."""

    def __init__(self, machine: Machine, weights: str, prefill: PrefillMode, *, captures: bool = True) -> None:
        config, setup = machine.config, machine.setup
        self.machine, self.prefill = machine, prefill
        self.fingerprint = f"{weights}-{LAYOUT}-{prefill}"
        self.facts = EngineFacts(
            name="cuda", device=machine.device.name, context_tokens=setup.context_tokens, max_turns=setup.max_turns,
            vocabulary=config.vocab_size, eos_id=config.eos_token_id,
            max_drafts=config.dspark_block_size if machine.draft else 0,
        )  # fmt: skip
        self._launcher = Launcher(machine, prefill, captures=captures)
        self._seats: dict[str, Seat] = {}
        self._usual_s = 0.0
        self._worker = ThreadPoolExecutor(1, "cuda-engine", machine.device.use)

    @classmethod
    def load(
        cls, directory: Path, setup: Setup, prefill: PrefillMode = "replay", *, captures: bool = True,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Self:  # fmt: skip
        """Load the checkpoint in `directory`; blocks. Raises `CheckpointError`, `CommandError` or `DeviceError`."""
        return cls(Machine.load(directory, setup, progress), fingerprint(directory), prefill, captures=captures)

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Begin `turn` with an empty cache in `pages`; raises `ContextTooLong` or `QueueFull`."""
        wanted = len(turn.prompt.ids) + turn.sampling.max_tokens
        if wanted > self.facts.context_tokens:
            raise ContextTooLong(
                f"This model's maximum context length is {self.facts.context_tokens} tokens; "
                f"{len(turn.prompt.ids)} in the prompt and {turn.sampling.max_tokens} to generate make {wanted}."
            )
        if wanted > len(pages) * PAGE_TOKENS:
            raise ContextTooLong(f"{wanted} tokens do not fit into {len(pages)} pages of {PAGE_TOKENS}.")
        if not self._launcher.free:
            raise QueueFull(f"All {self.facts.max_turns} places are taken.", retry_after_s=1)
        seat = self._seats[turn.id] = Seat(turn, self._launcher.free.pop())
        self._worker.submit(self._launcher.begin, seat, tuple(pages))

    def detach(self, turn: str) -> None:
        """Forget `turn`; unknown turns are ignored."""
        seat = self._seats.pop(turn, None)
        if seat is not None:
            self._launcher.free.append(seat.slot)
            self._worker.submit(seat.let_go)

    async def step(self, plan: StepPlan) -> list[StepResult]:
        """Launch `plan` behind what was launched before, and wait for it; raises `EngineFailed`."""
        if plan.drafts > self.facts.max_drafts:
            raise EngineFailed(f"The plan asks for {plan.drafts} drafts, this engine verifies {self.facts.max_drafts}.")
        self.machine.device.use()
        try:
            launched = await asyncio.get_running_loop().run_in_executor(self._worker, self._launch, plan)
            return [result for part in launched for result in await self._collect(part)]
        except DeviceError as error:
            raise EngineFailed(f"The device failed: {error}.") from error

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Run `plan` and block until it is done; not beside `step`."""
        return asyncio.run(self.step(plan))

    def counters(self) -> Mapping[str, int]:
        """Attached turns and decode steps that nobody has heard of."""
        return {"turns": len(self._seats), "steps": sum(seat.pending for seat in self._seats.values())}

    async def close(self) -> None:
        """Wait for all work, then free everything."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._shut)
        await asyncio.to_thread(self._worker.shutdown)
        self._seats.clear()

    def _shut(self) -> None:
        self._launcher.close()
        self.machine.close()

    def _launch(self, plan: StepPlan) -> list[Launched]:
        """On the launching thread: queue the plan's decode turns, then its prefill ranges."""
        decoding = [seat for seat in map(self._seat, plan.decode) if not seat.finished]
        launched = [self._launcher.decode(decoding, plan.drafts)] if decoding else []
        return launched + [self._launcher.prefill(self._seat(part.turn), part) for part in plan.prefill]

    def _seat(self, turn: str) -> Seat:
        try:
            return self._seats[turn]
        except KeyError:
            raise EngineFailed(f"The plan names turn {turn}, which is not attached.") from None

    async def _collect(self, part: Launched) -> list[StepResult]:
        took_s = await wait_until(part.ready, self._usual_s, STEP_DEADLINE_S)
        self._usual_s += USUAL_SHARE * (took_s - self._usual_s)
        return [self._report(outcome) for outcome in part.take()]

    def _report(self, outcome: Outcome) -> StepResult:
        """The result of a turn."""
        seat, record = outcome.seat, outcome.record
        if record is None:
            return StepResult(turn=seat.turn.id, prefilled=outcome.prefilled)
        finish: Finish | None = None
        if record.done:
            finish = "stop" if record.done == ENDED_BY_EOS else "length"
        seat.length, seat.finished = record.length, finish is not None
        return StepResult(
            turn=seat.turn.id, ids=record.ids, prefilled=outcome.prefilled, drafted=record.verified,
            accepted=record.accepted, finish=finish,
        )  # fmt: skip

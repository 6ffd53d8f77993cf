"""The CUDA engine behind the engine protocol: plans in, tokens out, nothing of the device on the event loop.

One thread launches, in the order of the calls; the loop polls pinned memory for what the device has written there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from dsuf.checkpoint.fingerprint import fingerprint
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.handover import Handover, Reading, Writing
from dsuf.cuda.launcher import Launched, Launcher, Outcome, Seat
from dsuf.cuda.logits.masking import Masking
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.pages import PageCopier
from dsuf.cuda.prefill import PrefillMode
from dsuf.cuda.results import ENDED_BY_EOS
from dsuf.cuda.streams import Event, wait_until
from dsuf.errors import ContextTooLong, DeviceError, EngineFailed, QueueFull
from dsuf.types import CacheLayout, EngineFacts, Finish, OpenMask, SessionState, StepPlan, StepResult, Turn

_T = TypeVar("_T")
CopyPages = Callable[[Sequence[int], Sequence[memoryview], Sequence[Event]], None]

LAYOUT = "cuda-2"
"""Names the arrangement of caches that leave the device; part of their fingerprint."""

STEP_DEADLINE_S = 60.0
HELD_UP_S = 0.25
"""After so long without an answer of the launching thread, it is asked whether ranks have lost each other."""

USUAL_SHARE = 0.2
"""How much the last step counts in what the next is expected to take."""


class CudaEngine:
    """`dsuf.types.Engine` on a GPU. `prefill` chooses between the exact and the replayed prefill.

    Without `open_mask` it keeps to no constraint.
    """

    def __init__(
        self, machine: Machine, weights: str, prefill: PrefillMode, *, captures: bool = True,
        open_mask: OpenMask | None = None,
    ) -> None:  # fmt: skip
        config, setup = machine.config, machine.setup
        self.machine, self.prefill, self.open_mask = machine, prefill, open_mask
        self.facts = EngineFacts(
            name="cuda", device=name_devices(machine), context_tokens=setup.context_tokens, max_turns=setup.max_turns,
            vocabulary=config.vocab_size, eos_id=config.eos_token_id,
            max_drafts=config.dspark_block_size if machine.draft else 0, constrains=open_mask is not None,
            logprobs=True,
        )  # fmt: skip
        self._launcher = Launcher(machine, prefill, captures=captures)
        self.layout = CacheLayout(
            fingerprint=f"{weights}-{LAYOUT}-{prefill}", page_tokens=PAGE_TOKENS, page_bytes=machine.sizes.page_bytes,
            pages=machine.sizes.pages, state_bytes=self._launcher.shape.state_bytes,
            overrun_tokens=setup.overrun_of(config), replay_tokens=config.window_size if prefill == "replay" else 0,
        )  # fmt: skip
        self._handover = Handover(self._launcher, self.layout, prefill)
        self._seats: dict[str, Seat] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._usual_s: dict[Hashable, float] = {}
        self._worker = ThreadPoolExecutor(1, "cuda-engine", machine.device.use)
        self._copies = ThreadPoolExecutor(1, "cuda-copies", machine.device.use)
        machine.device.use()
        self._pages = PageCopier(machine.arena, machine.caches, machine.devices)

    @classmethod
    def load(
        cls, directory: Path, setup: Setup, prefill: PrefillMode = "replay", *, captures: bool = True,
        open_mask: OpenMask | None = None, progress: Callable[[int], None] = lambda done: None,
    ) -> Self:  # fmt: skip
        """Load the checkpoint in `directory`; blocks. Raises `CheckpointError`, `CommandError` or `DeviceError`."""
        machine = Machine.load(directory, setup, progress)
        engine = cls(machine, fingerprint(directory), prefill, captures=captures, open_mask=open_mask)
        try:
            engine._worker.submit(engine._launcher.prepare).result()
        except BaseException:
            engine._worker.submit(engine._shut).result()
            raise
        return engine

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Begin `turn` with an empty cache in `pages`; raises `ContextTooLong` or `QueueFull`."""
        wanted = len(turn.prompt.ids) + turn.sampling.max_tokens
        if wanted > self.facts.context_tokens:
            raise ContextTooLong(
                f"This model's maximum context length is {self.facts.context_tokens} tokens; "
                f"{len(turn.prompt.ids)} in the prompt and {turn.sampling.max_tokens} to generate make {wanted}."
            )
        if len(pages) < self.layout.pages_for(wanted + self.layout.overrun_tokens):
            raise ContextTooLong(f"{wanted} tokens do not fit into {len(pages)} pages of {PAGE_TOKENS}.")
        if not self._launcher.free:
            raise QueueFull(f"All {self.facts.max_turns} places are taken.", retry_after_s=1)
        masking = self._open_masking(turn)
        seat = self._seats[turn.id] = Seat(turn, self._launcher.free.pop(), masking)
        self._worker.submit(self._launcher.begin, seat, tuple(pages))

    def _open_masking(self, turn: Turn) -> Masking | None:
        """The mask of `turn`, if it has a constraint; raises `EngineFailed` where this engine keeps to none."""
        if turn.constraint is None:
            return None
        if self.open_mask is None:
            raise EngineFailed("This engine does not keep to constraints.")
        return Masking(self.open_mask(turn.constraint), turn, turn.constraint.spent)

    def detach(self, turn: str) -> None:
        """Forget `turn`; unknown turns are ignored."""
        seat = self._seats.pop(turn, None)
        if seat is not None:
            self._launcher.free.append(seat.slot)
            self._worker.submit(seat.let_go)

    def step(self, plan: StepPlan) -> Coroutine[Any, Any, list[StepResult]]:
        """Launch `plan` behind what was launched before, and wait for it; raises `EngineFailed`."""
        if plan.drafts > self.facts.max_drafts:
            raise EngineFailed(f"The plan asks for {plan.drafts} drafts, this engine verifies {self.facts.max_drafts}.")
        return self._start(self._finish(self._worker.submit(self._launch, plan)))

    def run(self, *plans: StepPlan) -> list[list[StepResult]]:
        """Launch `plans` one behind the other, and block until all are done."""

        async def run_all() -> list[list[StepResult]]:
            return list(await asyncio.gather(*[self.step(plan) for plan in plans]))

        return asyncio.run(run_all())

    def read_state(self, turn: str) -> Coroutine[Any, Any, SessionState | None]:
        """The state of an attached turn as the steps launched so far leave it; None in the midst of a replay."""
        return self._start(self._read_state(self._worker.submit(self._handover.read, self._seat(turn))))

    def resume(self, turn: str, length: int, state: SessionState | None) -> Coroutine[Any, Any, int]:
        """Let an attached turn without positions go on behind the first `length` of its prompt; where it begins.

        Without a state the rows of that many positions are in its pages, and a window of them is computed again. Raises
        `CheckpointError` if the state does not fit.
        """
        queued = self._worker.submit(self._handover.take_over, self._seat(turn), length, state)
        return self._start(self._take_over(queued))

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Copy each of `pages`, as the steps launched so far leave it, into the buffer at its place in `into`."""
        return self._start(_wait(self._copy_pages(self._pages.read, pages, into)))

    def write_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Fill each of `pages` from the buffer at its place in `rows`; what is launched later finds them so."""
        copying = self._copy_pages(self._pages.write, pages, rows)
        self._worker.submit(copying.exception)
        return self._start(_wait(copying))

    def _copy_pages(self, copy: CopyPages, pages: Sequence[int], buffers: Sequence[memoryview]) -> Future[None]:
        """On the copying thread, behind what is launched so far."""
        if len(pages) != len(buffers) or any(buffer.nbytes != self.layout.page_bytes for buffer in buffers):
            raise ValueError(f"{len(pages)} pages take as many buffers of {self.layout.page_bytes} bytes")
        marking = self._worker.submit(self._launcher.mark_all)
        return self._copies.submit(lambda: copy(pages, buffers, marking.result()))

    def counters(self) -> Mapping[str, int]:
        """Attached turns and decode steps that nobody has heard of."""
        return {"turns": len(self._seats), "steps": sum(seat.pending for seat in self._seats.values())}

    async def close(self, *, keep_machine: bool = False) -> None:
        """Wait for all work, then free everything; not the machine if that is another engine's as well."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._copies.shutdown)
        await asyncio.wrap_future(self._worker.submit(self._let_go if keep_machine else self._shut))
        await asyncio.to_thread(self._worker.shutdown)
        self._seats.clear()

    def _let_go(self) -> None:
        self._launcher.close()
        self._handover.close()
        self._pages.close()

    def _shut(self) -> None:
        self._let_go()
        self.machine.close()

    def _start(self, work: Coroutine[Any, Any, _T]) -> Coroutine[Any, Any, _T]:
        """Carry `work` out even if nobody waits for it any more; what comes of it is for later."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _result(task)

    async def _finish(self, launching: Future[list[Launched]]) -> list[StepResult]:
        """What comes of a plan that is being launched."""
        self.machine.device.use()
        try:
            return [result for part in await self._hear(launching) for result in await self._collect(part)]
        except DeviceError as error:
            raise EngineFailed(f"The device failed: {error}.") from error

    async def _hear(self, future: Future[_T]) -> _T:
        """What another thread comes to; raises `EngineFailed` where lost ranks may be what holds it up."""
        heard = asyncio.wrap_future(future)
        while len(self.machine.devices) > 1 and not (await asyncio.wait([heard], timeout=HELD_UP_S))[0]:
            try:
                self.machine.check()
            except DeviceError as error:
                raise EngineFailed(f"The device failed: {error}.") from error
        return await heard

    async def _await_copy(self, copied: Event) -> None:
        """Until `copied` is done, which is forgotten then."""
        try:
            await wait_until(lambda: copied.done, 0.0, STEP_DEADLINE_S, self.machine.check)
        except DeviceError as error:
            raise EngineFailed(f"The device failed: {error}.") from error
        copied.close()

    def _launch(self, plan: StepPlan) -> list[Launched]:
        """On the launching thread: queue the plan's decode turns, then its prefill ranges."""
        self.machine.check()
        decoding = [seat for seat in map(self._seat, plan.decode) if not seat.finished]
        prefilling = [(self._seat(part.turn), part) for part in plan.prefill]
        for seat, part in prefilling:
            self._launcher.check(seat, part)
        launched = [self._launcher.decode(decoding, plan.drafts)] if decoding else []
        return launched + [self._launcher.prefill(seat, part) for seat, part in prefilling]

    async def _read_state(self, launching: Future[Reading | None]) -> SessionState | None:
        reading = await self._hear(launching)
        if reading is None:
            return None
        await self._await_copy(reading.copied)
        return await self._handover.pack(reading)

    async def _take_over(self, launching: Future[Writing | int]) -> int:
        writing = await self._hear(launching)
        if isinstance(writing, int):
            return writing
        await self._await_copy(writing.copied)
        self._handover.forget(writing)
        return writing.length

    def _seat(self, turn: str) -> Seat:
        try:
            return self._seats[turn]
        except KeyError:
            raise EngineFailed(f"The plan names turn {turn}, which is not attached.") from None

    async def _collect(self, part: Launched) -> list[StepResult]:
        usual_s = self._usual_s.get(part.kind, 0.0)

        def check() -> None:
            part.stream.check()
            self._check()

        took_s = await wait_until(part.ready, usual_s, STEP_DEADLINE_S, check)
        self._check()
        self._usual_s[part.kind] = usual_s + USUAL_SHARE * (took_s - usual_s)
        return [self._report(outcome) for outcome in part.take()]

    def _check(self) -> None:
        """Raise `DeviceError` or `EngineFailed` where a rank or a mask was waited for in vain."""
        self.machine.check()
        self._launcher.answers.check()

    def _report(self, outcome: Outcome) -> StepResult:
        """The result of a turn."""
        seat, record = outcome.seat, outcome.record
        if record is None:
            return StepResult(turn=seat.turn.id, prefilled=outcome.prefilled)
        finish: Finish | None = None
        if record.done:
            finish = "stop" if record.done == ENDED_BY_EOS else "length"
        seat.length, seat.finished = record.length, finish is not None
        seat.generated += record.ids
        return StepResult(
            turn=seat.turn.id, ids=record.ids, prefilled=outcome.prefilled, drafted=record.verified,
            accepted=record.accepted, logprobs=outcome.logprobs, finish=finish,
            fault=seat.masking.find_fault(len(record.ids)) if seat.masking is not None and finish == "stop" else None,
        )  # fmt: skip


def name_devices(machine: Machine) -> str:
    """The GPU's name, with the number of GPUs where there are several."""
    count = len(machine.devices)
    return f"{count} x {machine.device.name}" if count > 1 else machine.device.name


async def _result(task: "asyncio.Task[_T]") -> _T:
    return await asyncio.shield(task)


async def _wait(future: Future[_T]) -> _T:
    return await asyncio.wrap_future(future)

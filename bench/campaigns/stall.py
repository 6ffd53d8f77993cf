"""A rank held up while a scheduler answers turns: what each turn hears, when, and whether the node counts as ready."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsuf.config import Settings
from dsuf.cuda.arena import Arena, Region
from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.streams import handle_on
from dsuf.errors import DeviceError, RequestError
from dsuf.node.pulse import Pulse
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from tests.cuda.drive import make_turn
from tests.sched.rig import serving

ASKED, HEARD_BEFORE, TURN_TOKENS = 9, 40, 400
"""Turns of which the scheduler is asked, results after which a rank is held up, and tokens of a turn at most."""

Prompts = Sequence[NDArray[np.int64]]


class Stall:
    """Turns that a scheduler answers while the second rank's decode stream is held up by a word in pinned memory."""

    def __init__(self, engine: CudaEngine, scheduler: Scheduler, prompts: Prompts) -> None:
        self.engine, self.scheduler, self.prompts = engine, scheduler, prompts
        self.word = Arena([Region("word", "i32", (1,), "word", pinned=True)])
        self.pulse, self.heard, self.held_s, self.first_s = Pulse(Settings(), Metrics("stall")), 0, 0.0, 0.0
        self.pulse.watch(scheduler, engine, Limits())
        self.pulse.starting = None

    def hold_up(self) -> None:
        """Let nothing that is queued from now on begin on the second rank."""
        first, second = self.engine.machine.devices
        stream = handle_on(self.engine._launcher.decode_stream.handle, 1)  # nobody else knows where steps are queued
        flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        second.use()
        call(driver.cuStreamWaitValue32(stream, self.word["word"].pointer, 1, flags))
        first.use()
        self.held_s = time.monotonic()

    def let_go(self) -> None:
        """Let it go on."""
        self.word.host("word")[0] = 1

    async def ask(self, number: int) -> str:
        """What comes of a turn: an error's name and text, or that it ended."""
        try:
            async for _ in self.scheduler.submit(make_turn(self.prompts[number % len(self.prompts)], TURN_TOKENS)):
                self.heard += 1
                if self.heard == HEARD_BEFORE:
                    self.hold_up()
        except RequestError as error:
            self.first_s = self.first_s or time.monotonic() - self.held_s
            return f"{type(error).__name__}: {error}"
        return "ended"

    def name_rank(self) -> str:
        """What the engine says of its ranks, as its log has it."""
        try:
            self.engine.machine.check()
        except DeviceError as error:
            return str(error)
        return ""

    async def run(self) -> dict[str, object]:
        """Ask for more turns than there are places, and for one when all is over."""
        before = self.pulse.readiness().ready
        async with asyncio.timeout(60):
            said = await asyncio.gather(*[self.ask(number) for number in range(ASKED)])
            while self.scheduler.trouble is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            later = await self.ask(0)
        after = self.pulse.readiness()
        errors = [text for text in said if text != "ended"]
        return {
            "asked": ASKED, "ended_before": len(said) - len(errors), "errors": len(errors),
            "first_error_s": round(self.first_s, 2), "hears": errors[0] if errors else "", "says": self.name_rank(),
            "later": later, "ready_before": before, "ready_after": after.ready, "failing": "; ".join(after.failing),
        }  # fmt: skip


async def stall_served(engine: CudaEngine, prompts: Prompts) -> dict[str, object]:
    """The second rank held up under a scheduler; it may go on at the end."""
    async with serving(engine, chunk_tokens=128, queue_limit=64, failing_steps=3, probe_s=0.05) as scheduler:
        stalled = Stall(engine, scheduler, prompts)
        try:
            return await stalled.run()
        finally:
            stalled.let_go()

"""A scheduler over a scripted engine whose vocabulary is one id a character."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dsuf.engine_scripted import Rule, Script, ScriptedEngine
from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.sessions import Sessions
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import EngineFacts, Prompt, Sampling, StepResult, Ticket, Turn

IDLE = {"queued": 0, "attached": 0, "running": 0, "writing": 0}


def encode(text: str) -> list[int]:
    """One id a character."""
    return [ord(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    """The text of ids made by `encode`."""
    return "".join(map(chr, ids))


def make_facts(**changes: Any) -> EngineFacts:
    """Facts of a small engine."""
    values: dict[str, Any] = {"name": "scripted", "device": "none", "context_tokens": 4096, "max_turns": 4}
    values |= {"vocabulary": 0x110000, "eos_id": 1}
    return EngineFacts(**(values | changes))


def make_engine(*rules: Rule, **facts: Any) -> ScriptedEngine:
    """An engine that answers by `rules`."""
    return ScriptedEngine(Script(rules=rules), encode, decode, make_facts(**facts))


def make_turn(
    name: str, prompt: str = "hello", *, max_tokens: int = 100, tenant: str = "", priority: int = 0,
    timeout_s: float | None = None,
) -> Turn:  # fmt: skip
    """A greedy turn."""
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=max_tokens)
    ids = tuple(encode(prompt))
    return Turn(
        id=name, prompt=Prompt(ids=ids), sampling=sampling, tenant=tenant, priority=priority, timeout_s=timeout_s
    )  # fmt: skip


def make_scheduler(engine: Any, *, blocks: int = 256, **limits: Any) -> Scheduler:
    """A scheduler with sessions of its own over `engine`, and host memory for so many of its pages."""
    metrics = Metrics("test")
    page_bytes = engine.layout.page_bytes
    arena = Arena(Blocks(page_bytes, map_memory(page_bytes * blocks)))
    return Scheduler(engine, Limits(**({"chunk_tokens": 4} | limits)), metrics, Sessions(engine, arena, metrics))


@contextlib.asynccontextmanager
async def serving(engine: Any, **limits: Any) -> AsyncIterator[Scheduler]:
    """A scheduler whose loop runs for the length of the block."""
    scheduler = make_scheduler(engine, **limits)
    loop = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
        assert not loop.done() or loop.exception() is None
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await scheduler._sessions.close()


async def read(ticket: Ticket) -> list[StepResult]:
    """All results of a ticket."""
    return [result async for result in ticket]


async def read_text(ticket: Ticket) -> str:
    """The text of a ticket's tokens."""
    return decode([token for result in await read(ticket) for token in result.ids])


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def pass_steps(scheduler: Scheduler, count: int) -> None:
    """Wait until the loop has finished `count` more steps."""
    target = scheduler.steps + count
    await until(lambda: scheduler.steps >= target)

"""A scheduler with its sessions over an engine, on virtual time: turns go in, tokens and cache bytes come out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.giver import LocalGiver
from dsuf.kv.handoff import Giver
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Turn, Usage
from tests.sched.rig import IDLE


class Reply(NamedTuple):
    """What a turn gave, and where its prompt came from."""

    tokens: list[int]
    usage: Usage


class Node:
    """Turns through all layers but HTTP. With a `giver` another node computes the prompts."""

    def __init__(self, engine: Any, *, blocks: int = 4000, giver: Giver | None = None, **limits: Any) -> None:
        self.engine, self.metrics = engine, Metrics("test")
        size = engine.layout.page_bytes
        self.arena = Arena(Blocks(size, map_memory(size * blocks)))
        self.sessions = Sessions(engine, self.arena, self.metrics)
        self.taker = None if giver is None else Taker(self.sessions, giver, self.metrics, deadline_s=5.0)
        self.scheduler = Scheduler(engine, Limits(**limits), self.metrics, self.sessions, self.taker)
        self.giver = LocalGiver(self.sessions, self.scheduler.prepare)

    async def run(self, turn: Turn) -> Reply:
        """`turn` from its submission to its end."""
        ticket = self.scheduler.submit(turn)
        tokens = [token async for result in ticket for token in result.ids]
        assert ticket.usage.prompt_tokens == len(turn.prompt.ids)
        assert ticket.usage.completion_tokens == len(tokens)
        return Reply(tokens, ticket.usage)

    async def run_all(self, *turns: Turn) -> list[Reply]:
        """`turns` at the same time."""
        return list(await asyncio.gather(*(self.run(turn) for turn in turns)))

    async def rest(self) -> None:
        """Wait until nothing is on its way any more; then nothing is in use."""
        names = ("turns", "copies", "pages_held", "leases", "filling", "dying")
        async with asyncio.timeout(60):
            while self.scheduler.counters() != IDLE or any(self.sessions.counters()[name] for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert set(self.engine.counters().values()) == {0}
        assert self.engine.violations == []

    async def forget_device(self) -> None:
        """From now on everything is found in the host arena only."""
        await self.rest()
        self.sessions.pool.forget_all()

    def read_metric(self, name: str) -> float:
        """A sample of the metrics, by its line's beginning."""
        lines = self.metrics.render().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def serving(engine: Any, **options: Any) -> AsyncIterator[Node]:
    """A node whose loop runs for the length of the block; afterwards everything has come back."""
    node = Node(engine, **options)
    loop = asyncio.create_task(node.scheduler.run())
    try:
        yield node
        await node.rest()
        assert not loop.done()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    await node.sessions.close()
    assert set(node.sessions.counters().values()) == {0}
    assert node.arena.blocks.free == node.arena.blocks.count
    assert node.sessions.pool.room == engine.layout.pages

"""Turns that go on elsewhere, in the test machines: whatever happens to a pull, the turn has its tokens in time.

python3 -m tests.rdma.turns [NAME...]     # against a keeper on the other machine, or on the only one
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from dsuf.kv.transport.hello import Terms
from dsuf.types import Turn
from tests.rdma.keeper import PORT
from tests.rdma.node import DEADLINE_S, FleetMember, Node
from tests.rdma.owner import Control
from tests.rdma.report import Report, try_all
from tests.toy import make_turn

PROMPT = [7 * i % 501 for i in range(800)]


class World:
    """A keeper with a conversation, and a node that is to go on with it."""

    def __init__(self, control: Control) -> None:
        self.control, self.dead = control, False
        self.node: Node

    async def begin(
        self, *, lease_s: float = 30.0, keeper_rdma: bool = True, rdma: bool = True, fingerprint: str = "",
        compute: bool = False,
    ) -> Turn:  # fmt: skip
        """The next turn of a conversation that the keeper keeps."""
        self.boot = await self.control.ask("begin", lease_s, keeper_rdma)
        conversation = await self.control.ask("keep", PROMPT)
        self.kept = len(conversation) - 1
        self.node = Node(rdma=rdma)
        terms = Terms(fingerprint, self.node.terms.fabric) if fingerprint else None
        self.node.take_from(host(), self.boot, terms, compute=compute)
        self.node.start()
        return make_turn("next", (*conversation, 7, 8))

    async def run(self, turn: Turn) -> int:
        """Run `turn`, whose tokens must be those of a cold run; how much of its prompt came from the keeper."""
        started_s = time.monotonic()
        tokens, peer_tokens = await self.node.run(turn)
        assert tokens == self.node.engine.cold_tokens(turn), "other tokens than those of a cold run"
        assert time.monotonic() - started_s < DEADLINE_S + 10
        return peer_tokens

    async def pulling(self, turn: Turn) -> "asyncio.Task[int]":
        """Run `turn`; this returns when some of its cache has come, and some has not."""
        running = asyncio.create_task(self.run(turn))
        blocks = self.node.arena.blocks
        async with asyncio.timeout(30):
            while not any(blocks._used[block] and any(blocks.view(block)[:8]) for block in range(blocks.count)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert self.node.arena.counters()["filling"] == 1, "it was too fast"
        return running

    async def kill(self) -> None:
        """Kill the keeper."""
        self.dead = True
        await self.control.end("die")

    async def missed(self, running: Awaitable[int]) -> str:
        """The pull came to nothing, and the turn was right."""
        started_s = time.monotonic()
        assert await running == 0
        return f"a miss; right tokens {time.monotonic() - started_s:.1f} s later"

    async def close(self) -> None:
        """Nothing is left here, nor at the keeper, if it lives."""
        if not hasattr(self, "node"):
            return
        await self.node.close()
        started_s = time.monotonic()
        while not self.dead and any((held := await self.control.ask("held")).values()):
            assert time.monotonic() - started_s < 10, f"left at the keeper: {held}"
            await asyncio.sleep(0.1)


def host() -> str:
    """Where the keeper is."""
    return os.environ["DSUF_ADDRESS" if os.environ["DSUF_NODES"] == "1" else "DSUF_OTHER"]


TURNS: dict[str, Callable[[World], Awaitable[str]]] = {}


def case(function: Callable[[World], Awaitable[str]]) -> Callable[[World], Awaitable[str]]:
    """Try it under its name."""
    TURNS[function.__name__] = function
    return function


@case
async def resumes_elsewhere(world: World) -> str:
    """All of it, by RDMA alone."""
    turn = await world.begin()
    started_s = time.monotonic()
    peer_tokens = await world.run(turn)
    took_s = time.monotonic() - started_s
    assert peer_tokens == world.kept, (peer_tokens, world.kept)
    assert await world.control.ask("served") == 0
    assert world.node.peer is not None
    pulled = world.node.peer.pulled_bytes
    return f"{peer_tokens} tokens, {pulled >> 20} MiB by RDMA, {took_s:.1f} s"


@case
async def prompt_is_computed_there(world: World) -> str:
    """One node computes the prompt, the other takes it over meanwhile and answers."""
    await world.begin(compute=True)
    turn = make_turn("new", [5 * i % 499 for i in range(700)])
    peer_tokens = await world.run(turn)
    assert peer_tokens >= 699, peer_tokens
    assert await world.control.ask("served") == 0
    return f"{peer_tokens} tokens"


@case
async def through_directory_and_redis(world: World) -> str:
    """Two members of a fleet: the second one learns from Redis who keeps the beginning, and fetches it by RDMA."""
    await world.control.ask("begin_fleet")
    conversation = await world.control.ask("keep", PROMPT[:200])
    world.node = member = FleetMember("second", host())
    await member.join()
    try:
        await world.run(make_turn("first here", [3] * 60))  # from then on it knows what computing takes
        async with asyncio.timeout(10):
            while not member.fleet.directory.counters()["entries"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        peer_tokens = await world.run(make_turn("next", (*conversation, 7, 8)))
        assert peer_tokens == len(conversation) - 1, (peer_tokens, member.fleet.facts())
        kept = await world.control.ask("fleet")
        assert kept["transport"] == member.fleet.transport == "RDMA"
        assert member.fleet.facts()["peers"]["rdma"] == 1 and kept["guests"]["connections"] == 1, (
            "one more would be TCP"
        )
    finally:
        world.dead = True  # its own Redis ends with it
    return f"{peer_tokens} tokens; {kept['directory']}"


@case
async def without_a_device_over_tcp(world: World) -> str:
    turn = await world.begin(rdma=False)
    assert await world.run(turn) == world.kept
    served = await world.control.ask("served")
    assert served > 1 << 20
    return f"{served >> 20} MiB over TCP"


@case
async def keeper_without_a_device(world: World) -> str:
    turn = await world.begin(keeper_rdma=False)
    assert await world.run(turn) == world.kept
    assert await world.control.ask("served") > 1 << 20
    return "over TCP"


@case
async def keeper_killed_before(world: World) -> str:
    turn = await world.begin()
    await world.kill()
    return await world.missed(world.run(turn))


@case
async def keeper_killed_meanwhile(world: World) -> str:
    turn = await world.begin()
    running = await world.pulling(turn)
    await world.kill()
    return await world.missed(running)


@case
async def keeper_killed_afterwards(world: World) -> str:
    """What came stays."""
    turn = await world.begin()
    peer_tokens = await world.run(turn)
    await world.kill()
    again = msgspec.structs.replace(turn, id="again")
    assert peer_tokens == world.kept
    await world.run(again)
    return f"{peer_tokens} tokens"


@case
async def keeper_restarted_under_its_address(world: World) -> str:
    """Another boot is another node."""
    turn = await world.begin()
    await world.kill()
    world.control, world.dead = await Control.open(host(), PORT), False
    assert await world.control.ask("begin") != world.boot
    await world.control.ask("keep", PROMPT)
    return await world.missed(world.run(turn))


@case
async def another_model(world: World) -> str:
    turn = await world.begin(fingerprint="another")
    return await world.missed(world.run(turn))


@case
async def flipped_bit(world: World) -> str:
    turn = await world.begin()
    await world.control.ask("flip")
    text = await world.missed(world.run(turn))
    counted = world.node.metrics.render().decode()
    assert "dsuf_session_cache_checksum_failures_total 1" in counted, counted
    return text


@case
async def lease_over_and_blocks_reused(world: World) -> str:
    """The lease is too short for the pull, and something else comes into the blocks at once.

    Where the machine is so fast that all came before the lease was over, there was nothing to miss, and all is right.
    """
    turn = await world.begin(lease_s=0.3)
    running = await world.pulling(turn)
    while (await world.control.ask("held"))["lent"]:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.01)
    freed = await world.control.ask("reuse")
    peer_tokens = await running
    memory = bytes(world.node.arena.blocks.memory)
    assert b"\x66" * 64 not in memory, "rows of something else came over"
    return f"{freed} blocks reused; " + (f"{peer_tokens} tokens came in time" if peer_tokens else "a miss")


@case
async def withdrawn_meanwhile(world: World) -> str:
    """What is lent stays until it was read."""
    turn = await world.begin()
    running = await world.pulling(turn)
    await world.control.ask("reuse")
    peer_tokens = await running
    assert peer_tokens == world.kept
    return f"{peer_tokens} tokens"


@case
async def control_connection_cut(world: World) -> str:
    turn = await world.begin()
    running = await world.pulling(turn)
    assert world.node.peer is not None and world.node.peer._line is not None
    world.node.peer._line.link.end("cut")
    return await world.missed(running)


@case
async def keeper_frozen_meanwhile(world: World) -> str:
    """Its memory is read all the same, but it does not say that the lease held."""
    turn = await world.begin()
    running = await world.pulling(turn)
    world.control.tell("freeze", 9.0)
    return await world.missed(running)


@case
async def turn_leaves_meanwhile(world: World) -> str:
    """Its blocks come back, those of the keeper too, and the next one has all that it wants."""
    turn = await world.begin()
    running = await world.pulling(turn)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    started_s = time.monotonic()
    await world.node.rest()
    took_s = time.monotonic() - started_s
    while (held := await world.control.ask("held"))["lent"]:
        assert time.monotonic() - started_s < 10, held
        await asyncio.sleep(0.05)
    peer_tokens = await world.run(msgspec.structs.replace(turn, id="again"))
    return f"all came back after {took_s:.2f} s; then {peer_tokens} tokens"


async def try_one(name: str) -> str:
    """One case, with nodes of its own."""
    world = World(await Control.open(host(), PORT))
    try:
        return await TURNS[name](world)
    finally:
        try:
            await world.close()
        finally:
            world.control.close()


def main(names: Sequence[str]) -> list[Report]:
    """Try the cases; they are in the file `report.turns`."""
    return asyncio.run(try_all("turns", names or list(TURNS), try_one, 60.0))


if __name__ == "__main__":
    sys.exit(0 if all(report.good for report in main(sys.argv[1:])) else 1)

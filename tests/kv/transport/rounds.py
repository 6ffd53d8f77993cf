"""Many turns between two small nodes over connections that lose, delay, double and damage what is sent."""

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Any

import msgspec

from dsuf.kv import taker
from dsuf.kv.handoff import Offer
from dsuf.kv.taker import Taker
from dsuf.kv.transport.memory import Fault, Plan, through_memory
from dsuf.kv.transport.peer import PeerGiver
from dsuf.kv.transport.server import PeerServer
from dsuf.types import Turn
from tests.kv.rig import ids
from tests.kv.test_handoff import Pair, until
from tests.kv.transport.rig import FAR, NEAR, SECRET, TERMS
from tests.toy import make_turn
from tests.turns.clock import run_virtually

LEASE_S, DEADLINE_S = 0.008, 0.08


class Unsteady(Pair):
    """A pair over memory. Each thing that is sent has a fault with probability `faulty`."""

    def __init__(self, rng: random.Random, faulty: float, replay: int, plan: Plan | None = None) -> None:
        super().__init__(replay_tokens=replay, deadline_s=DEADLINE_S, lease_s=LEASE_S, blocks=24, pages=64)
        self.rng, self.faulty, self.faults = rng, faulty, Counter[str]()
        if faulty and rng.random() < 0.5:
            self.let_clocks_differ()
        self.server = PeerServer(FAR, self.giver, TERMS, SECRET, silence_s=0.2, idle_s=0.05)
        dial = through_memory(self.server, self.far.arena.blocks, NEAR, TERMS, plan or self.plan)
        self.peer = PeerGiver(FAR, dial, ask_s=0.1, tell_s=0.05, silence_s=0.2, retry_s=0.001)
        self.taker = Taker(self.near.sessions, self.peer, self.near.metrics, deadline_s=DEADLINE_S)
        self.far.engine.step_s = lambda plan: 0.001

    def plan(self, kind: str, size_bytes: int) -> Fault:
        """One fault, or none."""
        if self.rng.random() >= self.faulty:
            return Fault(late_s=self.rng.choice((0.0, 0.0001)))
        name = self.rng.choice(("late", "late", "twice", "never", "flip", "cut"))
        self.faults[name] += 1
        return {
            "late": Fault(late_s=self.rng.choice((0.002, LEASE_S, 3 * LEASE_S, 2 * DEADLINE_S))),
            "twice": Fault(late_s=self.rng.choice((0.0, 0.01)), copies=2), "never": Fault(copies=0),
            "flip": Fault(flip=self.rng.randrange(8 * size_bytes)), "cut": Fault(cut=True),
        }[name]  # fmt: skip

    async def leave_early(self, turn: str, prompt: tuple[int, ...]) -> None:
        """Want a prompt, and then not any more."""
        task = asyncio.ensure_future(self.taker.take(make_turn(turn, prompt), compute=self.rng.random() < 0.5))
        await asyncio.sleep(self.rng.choice((0.0, 0.0005, 0.002, 0.01)))
        task.cancel()
        await asyncio.wait({task})

    def let_clocks_differ(self) -> None:
        """The reader believes in its lease long after the giver has ended it, and reads what took its place."""
        offer = self.giver.offer

        async def offer_longer(turn: Turn, pages: int, *rest: Any) -> Offer | None:
            found = await offer(turn, pages, *rest)
            return None if found is None else msgspec.structs.replace(found, ttl_s=50 * LEASE_S)

        self.giver.offer = offer_longer  # type: ignore[method-assign]

    async def use_room(self, turn: str) -> None:
        """Turns of the far node's own, for which what it keeps has to make room."""
        for number in range(4):
            await asyncio.sleep(self.rng.choice((0.0, 0.002, 0.01)))
            first = 1000 + self.rng.randrange(10**6)
            await self.far.run(make_turn(f"{turn} {number}", range(first, first + self.rng.randint(40, 100))))

    async def finish(self) -> None:
        """Nothing is left."""
        self.faulty = 0.0
        while self.taker._leaving:
            await asyncio.wait(self.taker._leaving)
        await self.peer.close()
        await until(lambda: not any(self.server.counters().values()))
        await self.server.close()
        assert self.peer._taken == {}
        await self.close()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def play(seed: int, rounds: int, ends: Counter[str]) -> None:
    """Turns over a few prompts, some computed by the far node, some kept there; each is compared with a cold run."""
    rng = random.Random(seed)
    pair = Unsteady(rng, rng.choice((0.02, 0.05, 0.15)), rng.choice((0, 6, 8)))
    for number in range(rounds):
        prompt = ids(rng.randint(1, 60), [rng.randrange(5)] * rng.randint(0, 20))
        compute = rng.random() < 0.5
        if not compute and rng.random() < 0.5:
            await pair.far.run(make_turn(f"far {number}", prompt))
        if rng.random() < 0.2:
            await pair.leave_early(f"left {number}", prompt)
            ends["left"] += 1
        busy = [asyncio.ensure_future(pair.use_room(f"busy {number}"))] if rng.random() < 0.6 else []
        restored, _ = await pair.run(make_turn(str(number), prompt), compute)
        await asyncio.gather(*busy)
        ends["peer" if restored.peer_tokens else "own"] += 1
    ends.update(pair.faults)
    await pair.finish()


def play_virtually(seed: int, rounds: int) -> Counter[str]:
    """How the turns of a seed ended, and the faults that were met."""
    ends, rng, most_s = Counter[str](), random.Random(seed), taker.AVOID_MOST_S
    taker.AVOID_MOST_S = 0.0
    try:
        run_virtually(partial(play, seed, rounds, ends), lambda: rng.choice((0.0, 0.0003)))
    finally:
        taker.AVOID_MOST_S = most_s
    return ends

"""Members of a fleet over one board: an arena and a directory each, and ways to wait for what they know."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsuf.kv.directory.board import Board
from dsuf.kv.directory.contract import Candidate, Member
from dsuf.kv.directory.fleet import FleetDirectory
from dsuf.kv.directory.pace import Pace
from dsuf.kv.point import CommitPoint
from dsuf.observe.fleet import Fleet
from dsuf.observe.metrics import Metrics
from tests.kv.board import PACE
from tests.kv.rig import make_prompt_trace, make_small_arena, put


class Node:
    """A member: what it keeps, and its directory."""

    def __init__(self, board: Board, node: str, *, boot: str = "1", blocks: int = 2000, pace: Pace = PACE) -> None:
        self.arena = make_small_arena(blocks)
        self.arena.replay_tokens = 16
        self.metrics = Metrics("test")
        self.member = Member(node=node, boot=boot, host="127.0.0.1", port=8100)
        self.board = board
        self.directory = FleetDirectory(board, self.arena, lambda: self.member, self.metrics, pace=pace)
        self.metrics.fleet.watch(self._figures)

    def _figures(self) -> Fleet:
        counters = self.directory.counters()
        return Fleet(members=counters["members"], entries=counters["entries"], reached=bool(counters["up"]))

    def keep(self, prompt: Sequence[int], **state: Any) -> CommitPoint:
        """Keep the cache of a prompt."""
        point = put(self.arena, prompt, **state)
        assert point is not None
        return point

    def find(self, prompt: Sequence[int]) -> list[Candidate]:
        """Who else keeps something of a prompt."""
        return self.directory.find(make_prompt_trace(prompt), replay_tokens=16)

    def lengths(self, prompt: Sequence[int]) -> dict[str, int]:
        """By node, what it keeps of a prompt with a state."""
        return {candidate.member.node: candidate.length for candidate in self.find(prompt)}

    def names(self) -> list[str]:
        """Who else is there."""
        return [member.node for member in self.directory.members()]

    def told(self) -> set[bytes]:
        """What it tells of itself."""
        return set(self.directory._shelf._held)

    def known(self, other: "Node") -> set[bytes]:
        """What it knows of another member."""
        own = (other.member.node, other.member.boot)
        peers = [p for p in self.directory._roster.known() if (p.name.node, p.name.boot) == own]
        return set(self.directory._book.held(peers[0].holder)) if peers else set()

    def kill(self) -> None:
        """End its work as a crash would: nobody is told."""
        for task in self.directory._tasks:
            task.cancel()

    def count(self, name: str) -> float:
        """A sample of the metrics."""
        lines = self.metrics.render().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"dsuf_fleet_{name} "))


async def until(holds: Callable[[], object], timeout_s: float = 20.0) -> float:
    """Wait until `holds`; the seconds that it took."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < timeout_s, "not in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - started_s


def agree(*nodes: Node) -> bool:
    """Whether each knows of each other just what that keeps."""
    return all(one.known(other) == other.told() for one in nodes for other in nodes if one is not other)


async def churn(nodes: list[Node], rounds: int, rng: random.Random) -> None:
    """Keep and drop caches at random."""
    points = []
    for _ in range(rounds):
        node = rng.choice(nodes)
        prompt = [rng.randrange(3)] * 8 * rng.randrange(1, 12) + [rng.randrange(50)]
        points.append((node, node.keep(prompt)))
        if len(points) > 40:
            node, point = points.pop(rng.randrange(len(points)))
            node.arena.withdraw(point)
        await asyncio.sleep(0.0 if rng.random() < 0.7 else 0.002)

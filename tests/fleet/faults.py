"""What can happen to a node, to its connections or to Redis, each with its beginning and its end."""

import asyncio
import signal
import time
from collections.abc import Mapping

import aiohttp

from dsuf.trial.fleet import TrialFleet
from tests.fleet.clocks import OFF_S, Clocks, read_off_s
from tests.fleet.proxy import Proxy
from tests.fleet.rig import read_ready

PAUSE_S = 30.0
"""For how long Redis stands still."""


class Fault:
    """Nothing breaks. `begin` is called in the midst of a cache's bytes, `amid` when the turns of other nodes have
    ended, and tells what was wrong meanwhile, `end` when all turns have. While the victim is `gone` nobody asks it.
    Some pulls come to `result`.
    """

    result = "whole"

    def __init__(self, fleet: TrialFleet, proxy: Proxy, victim: int) -> None:
        self.fleet, self.proxy, self.victim = fleet, proxy, victim
        self.program = fleet.nodes[victim - 1]
        self.gone = False

    def begin(self) -> None:
        """It breaks now."""

    async def amid(self) -> list[str]:
        """What is wrong while it is broken."""
        return []

    async def end(self) -> None:
        """Mend it."""
        self.proxy.heal()


class Killed(Fault):
    """The victim is killed, and comes back only afterwards."""

    result = "failed"

    def begin(self) -> None:
        """SIGKILL."""
        self.gone = True
        self.program.send(signal.SIGKILL)

    async def end(self) -> None:
        """A new process under the same name and address."""
        await asyncio.to_thread(self.program.wait, 10.0)
        await asyncio.to_thread(self.program.start)
        await super().end()


class Restarted(Killed):
    """The victim is killed, and is back under the same address at once, knowing nothing."""

    def begin(self) -> None:
        """Another process takes its place."""
        super().begin()
        self.program.wait(5.0)
        self.program.start()

    async def end(self) -> None:
        """It is there already."""
        await Fault.end(self)


class Frozen(Fault):
    """The victim stands still until the others have answered, then goes on as if nothing were."""

    result = "late"

    def begin(self) -> None:
        """SIGSTOP."""
        self.program.send(signal.SIGSTOP)

    async def amid(self) -> list[str]:
        """It goes on."""
        self.program.send(signal.SIGCONT)
        return []


class Slow(Fault):
    """What the victim sends trickles."""

    result = "late"

    def begin(self) -> None:
        """A few kilobytes a second."""
        self.proxy.pace_bytes_s = 4e3


class Cut(Fault):
    """The victim's connections break; new ones can be made."""

    result = "failed"

    def begin(self) -> None:
        """Reset."""
        self.proxy.cut()


class Silent(Fault):
    """Nothing gets through to the victim or from it any more, and nobody is told."""

    result = "late"

    def begin(self) -> None:
        """Hold everything back."""
        self.proxy.silent = True


class Flipped(Fault):
    """Bits change on the way."""

    result = "failed"

    def begin(self) -> None:
        """One in each of the next pieces."""
        self.proxy.flips = 6


class RedisKilled(Fault):
    """Redis is gone until all turns have ended, then there again, empty."""

    def begin(self) -> None:
        """SIGKILL."""
        self.fleet.redis.send(signal.SIGKILL)

    async def amid(self) -> list[str]:
        """Nodes are ready all the same, and say what is wrong."""
        urls = [self.fleet.node_url(number) for number in range(1, len(self.fleet.nodes) + 1)]
        try:
            async with asyncio.timeout(15):
                while True:
                    texts = [await read_ready(url) for url in urls]
                    if not all(text.startswith("200") for text in texts):
                        return [f"without Redis: {texts}"]
                    if all("directory" in text for text in texts):
                        return []
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return [f"nobody says that Redis is gone: {texts}"]

    async def end(self) -> None:
        """An empty one."""
        await asyncio.to_thread(self.fleet.redis.wait, 10.0)
        await asyncio.to_thread(self.fleet.redis.start)
        await super().end()


class RedisEmptied(Fault):
    """Redis starts anew, with nothing in it."""

    def begin(self) -> None:
        """Another process takes its place."""
        redis = self.fleet.redis
        redis.send(signal.SIGKILL)
        redis.wait(5.0)
        redis.start()


class RedisPaused(RedisKilled):
    """Redis stands still for a time, with all its connections open."""

    def begin(self) -> None:
        """SIGSTOP."""
        self.began_s = time.monotonic()
        self.fleet.redis.send(signal.SIGSTOP)

    async def end(self) -> None:
        """It goes on after its time."""
        await asyncio.sleep(max(0.0, self.began_s + PAUSE_S - time.monotonic()))
        self.fleet.redis.send(signal.SIGCONT)
        await Fault.end(self)


class ClocksOff(Fault):
    """The time of day at the victim and at another node jumps, by minutes, and later back."""

    def begin(self) -> None:
        """One way and the other."""
        self._set(OFF_S)

    async def amid(self) -> list[str]:
        """They have jumped."""
        async with aiohttp.ClientSession() as session:
            off_s = await read_off_s(session, self.fleet.node_url(self.victim))
        return [] if abs(off_s - OFF_S) < 10 else [f"the clock is {off_s:.0f} s ahead"]

    async def end(self) -> None:
        """As they were."""
        self._set(0)
        await super().end()

    def _set(self, off_s: int) -> None:
        clocks = Clocks(self.fleet.folder, len(self.fleet.nodes))
        clocks.set(self.victim, off_s)
        clocks.set(self.victim % len(self.fleet.nodes) + 1, -off_s)


FAULTS: Mapping[str, type[Fault]] = {
    "none": Fault, "killed": Killed, "restarted": Restarted, "frozen": Frozen, "slow": Slow, "cut": Cut,
    "silent": Silent, "flipped": Flipped, "redis killed": RedisKilled, "redis emptied": RedisEmptied,
    "redis paused": RedisPaused, "clocks off": ClocksOff,
}  # fmt: skip

"""Many steps of the CUDA engine: random arrivals, lengths, drafts and departures, replies compared with a replay.

Turns come while there are places and pages, some leave in the midst of a prompt or a reply, steps are launched ahead.
From time to time nobody comes for a while: then pages, places and pending steps must all be back, and device and host
memory are noted. In the end a share of the replies is generated again, alone and without drafts: every token must be
the same. With a limit of time it ends there, however many steps that are.

    python bench/campaigns/steps.py [--steps 100000] [--limit-s 600] [--engines 1] [--model DIR] [--publish]
"""

import argparse
import asyncio
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.report import publish
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.cuda.arena import free_bytes
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.types import PrefillRange, Prompt, Sampling, StepPlan, Turn

AHEAD = 6
"""Steps that are launched before the first of them is read, at most."""
CHUNK_TOKENS, REPLY_TOKENS = 128, 120
"""The longest piece of a prompt that a step computes, and the longest reply."""

REPLAYED, KEPT = 200, 400
"""Replies that are generated again, and those that they are chosen from."""

SWITCH_S = 0.0005
"""How long a thread keeps the interpreter's lock while another waits for it, as in a node."""
MIB = 1 << 20
DEVICE_GROWTH_MIB, HOST_GROWTH_MIB = 0, 16
"""How much memory may grow from the first quarter to the end."""

PAUSE_STEPS, NOTED_PAUSES = 500, 10
"""Steps from one pause to the next, and pauses from one note of the memory to the next."""


class Guest(msgspec.Struct):
    """A turn in the engine: its pages, how far its prompt is launched, what it has said."""

    turn: Turn
    pages: list[int]
    fed: int = 0
    ids: list[int] = []
    ended: bool = False

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done."""
        return self.fed == len(self.turn.prompt.ids)


class Spoken(NamedTuple):
    """A turn that was heard to its end."""

    turn: Turn
    ids: list[int]


class Campaign:
    """Random turns on `engine`; `seed` decides everything."""

    def __init__(self, engine: CudaEngine, seed: int, longest_tokens: int) -> None:
        self.engine, self.rng, self.longest = engine, random.Random(seed), longest_tokens
        self.free, self.guests = list(range(engine.layout.pages)), dict[str, Guest]()
        self.steps = self.left = self.number = self.heard = 0
        self.spoken: list[Spoken] = []

    async def run(self, steps: int, pause: Any = None, until_s: float = math.inf) -> None:
        """Run until that many steps are done, or that time has come on the monotonic clock; `pause` is called whenever
        nobody is there."""
        while self.steps < steps and time.monotonic() < until_s:
            until = min(steps, self.steps + PAUSE_STEPS)
            while self.guests or self.steps < until:
                if self.steps < until:
                    self._welcome()
                await self._advance()
                self._see_off()
            self._check_empty()
            if pause is not None:
                pause()

    async def replay(self, count: int) -> int:
        """Generate some of the replies again, alone and without drafts; how many differ."""
        differ = 0
        for spoken in self.rng.sample(self.spoken, min(count, len(self.spoken))):
            turn = msgspec.structs.replace(spoken.turn, id=f"again-{spoken.turn.id}")
            guest = self._attach(turn)
            while not guest.ended:
                await self._advance(drafts=0)
            self._leave(guest)
            differ += guest.ids != spoken.ids
        return differ

    def _welcome(self) -> None:
        """Let turns come while there is room, at random."""
        while len(self.guests) < self.engine.facts.max_turns and self.rng.random() < 0.7:
            self.number += 1
            length = min(int(self.rng.expovariate(4 / self.longest)) + 1, self.longest)
            ids = tuple(self.rng.choices(range(3, self.engine.facts.vocabulary), k=length))
            greedy = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=self.rng.randrange(1, REPLY_TOKENS))
            turn = Turn(id=f"turn-{self.number}", prompt=Prompt(ids=ids), sampling=greedy)
            if self._count_pages(turn) > len(self.free):
                return
            self._attach(turn)

    def _count_pages(self, turn: Turn) -> int:
        layout = self.engine.layout
        return layout.pages_for(len(turn.prompt.ids) + turn.sampling.max_tokens + layout.overrun_tokens)

    def _attach(self, turn: Turn) -> Guest:
        pages = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(self._count_pages(turn))]
        self.engine.attach(turn, pages)
        self.guests[turn.id] = guest = Guest(turn=turn, pages=pages, ids=[])
        return guest

    async def _advance(self, drafts: int | None = None) -> None:
        """Launch some steps one behind the other, and take in what they say."""
        plans = [self._plan(drafts) for _ in range(self.rng.randrange(1, 1 + AHEAD))]
        plans = [plan for plan in plans if plan.prefill or plan.decode]
        for results in await asyncio.gather(*[self.engine.step(plan) for plan in plans]):
            self.steps += 1
            for result in results:
                guest = self.guests[result.turn]
                guest.ids += result.ids
                guest.ended = guest.ended or result.finish is not None

    def _plan(self, drafts: int | None) -> StepPlan:
        """Some prompts go on by a chunk, all replies by a step."""
        decode = tuple(name for name, guest in self.guests.items() if guest.decodes and not guest.ended)
        prefill = []
        for name, guest in self.guests.items():
            if not guest.decodes and len(prefill) < 2:
                stop = min(guest.fed + self.rng.randrange(1, CHUNK_TOKENS), len(guest.turn.prompt.ids))
                prefill.append(PrefillRange(name, guest.fed, stop))
                guest.fed = stop
        most = self.engine.facts.max_drafts
        wanted = self.rng.choice((0, 0, most)) if drafts is None else drafts
        return StepPlan(prefill=tuple(prefill), decode=decode, drafts=wanted)

    def _see_off(self) -> None:
        """Detach those that have ended, and a few others."""
        for guest in list(self.guests.values()):
            if guest.ended:
                self._keep(Spoken(guest.turn, guest.ids))
                self._leave(guest)
            elif self.rng.random() < 0.01:
                self.left += 1
                self._leave(guest)

    def _keep(self, spoken: Spoken) -> None:
        """Remember `KEPT` turns, every one of them with the same chance."""
        self.heard += 1
        if len(self.spoken) < KEPT:
            self.spoken.append(spoken)
        elif (place := self.rng.randrange(self.heard)) < KEPT:
            self.spoken[place] = spoken

    def _leave(self, guest: Guest) -> None:
        self.engine.detach(guest.turn.id)
        self.free += guest.pages
        del self.guests[guest.turn.id]

    def _check_empty(self) -> None:
        """All that was given out is back; raises `AssertionError`."""
        counters, pages = self.engine.counters(), sorted(self.free)
        assert not any(counters.values()), f"left behind: {counters}"
        assert pages == list(range(self.engine.layout.pages)), "pages were lost, or given out twice"


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Device memory of this process, or of all where the driver does not tell it apart; differences count."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        held = {int(pid): int(mib) for pid, mib in (line.split(",") for line in told.splitlines())}
        return held[os.getpid()] * MIB
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return -free_bytes()


async def measure(engines: Sequence[CudaEngine], steps: int, seed: int, limit_s: float) -> dict[str, object]:
    """One row of figures; the engines share the steps, and run beside each other."""
    campaigns, memory = [Campaign(engine, seed + i, 400) for i, engine in enumerate(engines)], list[tuple[int, int]]()
    start, pauses = time.monotonic(), 0

    def pause() -> None:
        nonlocal pauses
        pauses += 1
        if pauses % NOTED_PAUSES == 1:
            memory.append((device_bytes(), resident_bytes()))
            print(f"{sum(each.steps for each in campaigns)} steps after {time.monotonic() - start:.0f} s", flush=True)

    share = -(-steps // len(engines))
    await asyncio.gather(*[each.run(share, pause, start + limit_s) for each in campaigns])
    took_s, done = time.monotonic() - start, sum(each.steps for each in campaigns)
    differ = sum(await asyncio.gather(*[each.replay(REPLAYED // len(engines)) for each in campaigns]))
    memory.append((device_bytes(), resident_bytes()))
    settled, last = memory[len(memory) // 4], memory[-1]
    return {
        "engines": len(engines), "steps": done, "turns": sum(each.heard for each in campaigns),
        "left": sum(each.left for each in campaigns), "replayed": REPLAYED // len(engines) * len(engines),
        "different": differ, "device_growth_bytes": last[0] - settled[0], "host_growth_bytes": last[1] - settled[1],
        "seconds": round(took_s), "steps_per_s": round(done / took_s),
        "holds": not differ and last[0] - settled[0] <= DEVICE_GROWTH_MIB * MIB
        and last[1] - settled[1] <= HOST_GROWTH_MIB * MIB,
    }  # fmt: skip


def main() -> None:
    """Run, print and with --publish keep the figures; exit code 1 if a token differs or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which no step is begun")
    parser.add_argument("--engines", type=int, default=1, help="engines that share the steps, in one process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a checkpoint; without one the embedded model")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    model = args.model or ensure_embedded(Path.home() / ".cache" / "dsuf")
    setup = Setup(context_tokens=1024, max_turns=16, pages=90)
    engines = [CudaEngine.load(model, setup, "replay") for _ in range(args.engines)]
    sys.setswitchinterval(SWITCH_S)
    row = uvloop.run(measure(engines, args.steps, args.seed, args.limit_s))
    print(row)
    if args.publish:
        publish("steps", [row], engines[0].facts.device)
    sys.exit(not row["holds"])


if __name__ == "__main__":
    main()

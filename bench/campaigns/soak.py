"""A server under mixed load for a long time: streams and whole replies, clients that leave, nonsense, long prompts.

At the end memory must have stayed flat (the rule: bench/campaigns/memory.py), nothing may have gone wrong that was not
provoked, nothing may stand in the server's log, and all that is held for turns must be free again. Session caches that
a busy engine did not come to in time cost their reuse only; they are counted and no fault. The server prefills in exact
mode, so that a greedy reply must be the same whenever it is asked for.

    python bench/campaigns/soak.py [--minutes 30] [--visitors 6] [--discard]
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import msgspec

from bench.campaigns.memory import GROWTH_LIMIT, Sample, Verdict, judge
from bench.campaigns.tally import Tally
from bench.campaigns.visitor import Visitor
from bench.report import publish
from bench.server import Server, serve_noise

KEYS = ("north", "south", "west")
ADMIN = "harbour"
SAMPLES = 300
SETTLE_S = 15.0
JUDGED_S = 600.0
"""In a shorter run caches and allocators are still filling: its memory is told and not judged."""
SPARE_FILES = 4
FAULT_CHARACTERS = 200
SERVER = (
    "--max-turns", "6", "--context-tokens", "8192", "--cache-bytes", str(12 << 20), "--prefill", "exact",
    "--drafts", "2", "--api-keys", ",".join(KEYS), "--admin-keys", ADMIN, "--log-level", "warning",
)  # fmt: skip
CACHED = ("entries", "bytes", "pages_cached")
"""What may be kept beyond a turn, until it is dropped."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to: what was done, memory, what was still held at the end, what the log says, and how many
    session caches were given up since the engine did not come to them in time."""

    tally: Tally
    memory: Verdict
    seconds: float
    leftovers: Sequence[str]
    log_lines: Sequence[str]
    files: tuple[int, int]
    threads: tuple[int, int]
    late_caches: int

    def faults(self) -> list[str]:
        """All that must not be."""
        memory, (files, files_left) = self.memory, self.files
        found = [*self.tally.faults, *self.leftovers, *(f"log: {line}" for line in self.log_lines)]
        if self.seconds >= JUDGED_S and not memory.flat:
            found.append(f"memory grows by {memory.growth_share:.1%} behind the warm-up, over {GROWTH_LIMIT:.0%}")
        if files_left > files + SPARE_FILES:
            found.append(f"{files_left} open files, {files} at the start")
        return found


class MemoryWatch:
    """Samples the memory of a server."""

    def __init__(self, server: Server) -> None:
        self.samples: list[Sample] = []
        self._server = server

    async def run(self, interval_s: float) -> None:
        """Sample until cancelled."""
        started_s = time.monotonic()
        while True:
            self.samples.append(Sample(time.monotonic() - started_s, self._server.resident_bytes()))
            await asyncio.sleep(interval_s)


async def soak(server: Server, log: Path, *, seconds: float, visitors: int, seed: int) -> Outcome:
    """Visit `server` for so long."""
    tally, watch, until_s = Tally(), MemoryWatch(server), time.monotonic() + seconds
    files, threads = server.count_files(), server.count_threads()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        crowd = [
            Visitor(client, server.url, KEYS[i % len(KEYS)], random.Random(f"{seed} {i}"), tally)
            for i in range(visitors)
        ]
        sampling = asyncio.create_task(watch.run(seconds / SAMPLES))
        await asyncio.gather(*(visitor.visit(until_s) for visitor in crowd))
        sampling.cancel()
        leftovers, late = await find_leftovers(client, server.url), await count_late(client, server.url)
    await asyncio.sleep(1.0)  # connections close
    written = await asyncio.to_thread(log.read_text)
    return Outcome(
        tally=tally, memory=judge(watch.samples), seconds=seconds, leftovers=leftovers, log_lines=written.splitlines(),
        files=(files, server.count_files()), threads=(threads, server.count_threads()),
        late_caches=late,
    )  # fmt: skip


async def find_leftovers(client: aiohttp.ClientSession, url: str) -> list[str]:
    """Counters that are not zero some time after the last request, and those of caches after these were dropped."""
    held = await settle(client, url, beyond=CACHED)
    async with client.post(f"{url}/flush_cache", headers={"authorization": f"Bearer {ADMIN}"}) as response:
        if response.status != 200:
            held.append(f"flush_cache: status {response.status}")
    return held + [f"after the flush: {line}" for line in await settle(client, url)]


async def count_late(client: aiohttp.ClientSession, url: str) -> int:
    """Session caches that were not filled, or not kept, since that took too long."""
    async with client.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    late = [line for line in lines if line.startswith("dsuf_session_cache_") and 'result="late"' in line]
    return round(sum(float(line.split()[-1]) for line in late if "_total{" in line))


async def settle(client: aiohttp.ClientSession, url: str, beyond: Sequence[str] = ()) -> list[str]:
    """Wait until all counters but those named in `beyond` are zero; those that do not become it, in words."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        async with client.get(f"{url}/server_info", headers={"authorization": f"Bearer {KEYS[0]}"}) as response:
            node = (await response.json())["node"]
        held = list_held(node, beyond)
        if not held or time.monotonic() > until_s:
            return held
        await asyncio.sleep(0.2)


def list_held(node: Mapping[str, Mapping[str, int]], beyond: Sequence[str] = ()) -> list[str]:
    """Counters of `/server_info` that are not zero."""
    return [
        f"{part}.{name} = {value}"
        for part in ("turns", "engine", "session_cache")
        for name, value in node[part].items()
        if value and name not in beyond
    ]


def describe(outcome: Outcome, minutes: float, visitors: int) -> dict[str, object]:
    """The line of the table."""
    memory, tally = outcome.memory, outcome.tally
    mib = 1 << 20
    return {
        "minutes": minutes,
        "visitors": visitors,
        "faults": len(outcome.faults()) + tally.fault_count - len(tally.faults),
        "doings": sum(tally.done.values()),
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "start_mib": memory.start_bytes / mib,
        "warm_mib": memory.warm_bytes / mib,
        "end_mib": memory.end_bytes / mib,
        "slope_mib_per_h": memory.slope_bytes_per_s * 3600 / mib,
        "growth_share": memory.growth_share,
        "files": list(outcome.files),
        "threads": list(outcome.threads),
        **tally.done,
        "late_caches": outcome.late_caches,
        "first_faults": [fault[:FAULT_CHARACTERS] for fault in outcome.faults()[:5]],
    }


def main() -> int:
    """Run the campaign; 0 if nothing went wrong, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--visitors", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--discard", action="store_true", help="keep no result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with serve_noise(log, *SERVER) as server:
            work = soak(server, log, seconds=60 * args.minutes, visitors=args.visitors, seed=args.seed)
            outcome = asyncio.run(work)
    row = describe(outcome, args.minutes, args.visitors)
    if args.discard:
        print(row)
    else:
        publish("soak", [row])
    for fault in outcome.faults():
        print(f"FAULT {fault}")
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())

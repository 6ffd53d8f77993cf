"""A server under requests that nobody should send, over raw sockets: slow, cut, oversized, pipelined, damaged, nested.

No reply may be a fault of the server's (5xx), none may fail to come, each must be JSON or events; at the end memory
must have stayed flat (bench/campaigns/memory.py), nothing may stand in the log or be held for turns, and a client that
does nothing wrong must be served. The engine is the scripted one: what is tried is everything before and behind it.

    python bench/campaigns/fuzz.py [--requests 100000] [--clients 16] [--seed 0] [--discard]
"""

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from bench.campaigns.memory import GROWTH_LIMIT, Sample, Verdict, judge
from bench.campaigns.rudeness import BODY_LIMIT_BYTES, Visit, draw
from bench.campaigns.tally import Tally
from bench.report import publish
from bench.server import Server, serve

PATIENCE_S = 20.0
"""For a reply; the server's own patience with a client is two seconds."""
SETTLE_S = 15.0
JUDGED_REQUESTS = 20_000
"""In a shorter run allocators are still filling: its memory is told and not judged."""
SAMPLES = 200
SPARE_FILES = 4
SCRIPT = {"rules": [{"reply": "one two three four five", "reasoning": "Hm.", "tokens_per_step": 2}]}
SERVER = (
    "--engine", "scripted", "--body-limit-bytes", str(BODY_LIMIT_BYTES), "--body-timeout-s", "2",
    "--write-timeout-s", "2", "--queue-limit", "10000", "--max-turns", "64", "--log-level", "warning",
)  # fmt: skip
_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to: visits by kind and faults, replies by status, memory, open files, what the log says."""

    tally: Tally
    statuses: Counter[int]
    seconds: float
    requests: int
    memory: Verdict
    files: tuple[int, int]
    log_lines: Sequence[str]
    left: Sequence[str]

    def faults(self) -> list[str]:
        """All that must not be."""
        found = [*self.tally.faults, *self.left, *(f"log: {line}" for line in self.log_lines)]
        if self.requests >= JUDGED_REQUESTS and not self.memory.flat:
            found.append(f"memory grows by {self.memory.growth_share:.1%}, over {GROWTH_LIMIT:.0%}")
        if self.files[1] > self.files[0] + SPARE_FILES:
            found.append(f"{self.files[1]} open files, {self.files[0]} at the start")
        return found


class Fuzz:
    """Visits a server; what came of it is in `tally` and `statuses`."""

    def __init__(self, server: Server, requests: int, seed: int) -> None:
        self.tally, self.statuses = Tally(), Counter[int]()
        self.samples: list[Sample] = []
        self._server, self._requests, self._seed = server, requests, seed
        self._port = int(server.url.rpartition(":")[2])
        self._next = 0
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Visit, one after the other, until all visits are made; several of these run at once."""
        while self._next < self._requests:
            number, self._next = self._next, self._next + 1
            if number % max(1, self._requests // SAMPLES) == 0:
                self.samples.append(Sample(time.monotonic() - self._began_s, self._server.resident_bytes()))
            visit = draw(random.Random(f"{self._seed} {number}"))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    reply = await self._make(visit)
            except TimeoutError:
                self.tally.fault(visit.kind, f"visit {number}: no end within {PATIENCE_S:g} s")
                continue
            self._judge(visit, number, reply)

    async def _make(self, visit: Visit) -> bytes:
        """Send the pieces and end as the visit says; what came back."""
        loop, raw, parts = asyncio.get_running_loop(), socket.socket(), list[bytes]()
        raw.setblocking(False)
        try:
            await loop.sock_connect(raw, ("127.0.0.1", self._port))
            for piece in visit.pieces:
                if piece is not visit.pieces[0]:
                    await asyncio.sleep(visit.pause_s)
                await loop.sock_sendall(raw, piece)
            if visit.end == "shut":
                raw.shutdown(socket.SHUT_WR)
            elif visit.end == "rst":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            while visit.end in ("read", "shut") and (part := await loop.sock_recv(raw, 1 << 16)):
                parts.append(part)
        except ConnectionError:
            pass  # the server may break off with who sends nonsense
        finally:
            raw.close()
        return b"".join(parts)

    def _judge(self, visit: Visit, number: int, reply: bytes) -> None:
        """Look at what came back."""
        statuses = [int(status) for status in _STATUS.findall(reply)]
        self.statuses.update(statuses)
        if any(status >= 500 for status in statuses):
            self.tally.fault(visit.kind, f"visit {number}: {reply[:300]!r}")
        elif visit.kind == "right" and statuses not in ([200], [404]):
            self.tally.fault(visit.kind, f"visit {number}: {statuses}")
        elif visit.kind in ("oversized", "stalled", "nested", "odd_values", "damaged") and len(statuses) > 1:
            self.tally.fault(visit.kind, f"visit {number}: {len(statuses)} replies to one request")
        elif (wrong := find_wrong_body(reply)) is not None:
            self.tally.fault(visit.kind, f"visit {number}: {wrong}")
        else:
            self.tally.count(visit.kind)


def find_wrong_body(reply: bytes) -> str | None:
    """What is wrong with the first reply's body, if that is said to be JSON and is there as a whole."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: ([0-9]+)", head)
    if b"application/json" not in head or length is None or len(rest) < int(length[1]):
        return None
    try:
        json.loads(rest[: int(length[1])])
    except ValueError as error:
        return f"no JSON ({error}): {rest[:200]!r}"
    return None


async def fuzz(server: Server, log: Path, *, requests: int, clients: int, seed: int) -> Outcome:
    """Make all visits."""
    began_s, files, work = time.monotonic(), server.count_files(), Fuzz(server, requests, seed)
    await asyncio.gather(*(work.run() for _ in range(clients)))
    left = await asyncio.to_thread(settle, server.url)
    seconds = time.monotonic() - began_s
    await asyncio.sleep(1.0)  # connections close
    written = await asyncio.to_thread(log.read_text)
    return Outcome(
        tally=work.tally, statuses=work.statuses, seconds=seconds, requests=requests, memory=judge(work.samples),
        files=(files, server.count_files()), log_lines=written.splitlines(), left=left,
    )  # fmt: skip


def settle(url: str) -> list[str]:
    """Wait until nothing is held for turns; what still is after some time, or what a quiet client is refused."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        node = ask(f"{url}/server_info")["node"]
        held = {name: count for name, count in (node["turns"] | node["engine"]).items() if count}
        if not held or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "hi"}]}
    answer = ask(f"{url}/v1/chat/completions", json.dumps(body).encode())["choices"][0]["message"]["content"]
    found = [f"still held: {held}"] if held else []
    return found if answer == SCRIPT["rules"][0]["reply"] else [*found, f"a quiet client got {answer!r}"]


def ask(url: str, body: bytes | None = None) -> dict[str, object]:
    """The JSON under `url`."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        found: dict[str, object] = json.load(reply)
        return found


def describe(outcome: Outcome, clients: int, seed: int) -> dict[str, object]:
    """The result's row."""
    memory, mib = outcome.memory, 1 << 20
    return {
        "requests": outcome.requests,
        "clients": clients,
        "seed": seed,
        "seconds": outcome.seconds,
        "faults": len(outcome.faults()),
        "statuses": {str(status): count for status, count in sorted(outcome.statuses.items())},
        "start_mib": memory.start_bytes / mib,
        "warm_mib": memory.warm_bytes / mib,
        "end_mib": memory.end_bytes / mib,
        "growth_share": memory.growth_share,
        "files": list(outcome.files),
        **outcome.tally.done,
        "first_faults": [fault[:300] for fault in outcome.faults()[:5]],
    }


def main() -> int:
    """Run the campaign; 0 if nothing went wrong, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--discard", action="store_true", help="keep no result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, script = Path(folder) / "server.log", Path(folder) / "script.json"
        script.write_text(json.dumps(SCRIPT))
        with serve(log, *SERVER, "--script", str(script)) as server:
            outcome = asyncio.run(fuzz(server, log, requests=args.requests, clients=args.clients, seed=args.seed))
    row = describe(outcome, args.clients, args.seed)
    if args.discard:
        print(row)
    else:
        publish("fuzz", [row])
    for fault in outcome.faults():
        print(f"FAULT {fault}")
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())

"""Load of a server by sessions of agents: growing prefixes, think time, tools, greedy and sampled replies.

Without --url it starts a server of its own with random weights. Closed loop: --users people, each of whom begins a
session when the last one ended. Open loop: --rate sessions begin a second, whatever the server does.

    python bench/serve.py [--url http://127.0.0.1:8000] [--users 8 | --rate 0.5] [--sessions 24]
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
import msgspec

from bench.chat import stream
from bench.conversation import Conversation, Shape
from bench.figures import Record, summarise
from bench.report import publish
from bench.server import serve_noise

TRIES = 5
"""A request that is sent away with a `Retry-After` is sent again so many times."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How conversations come: `users` at a time, or `rate` a second; `sessions` in all. Think time is a mean."""

    shape: Shape
    sessions: int
    users: int = 1
    rate: float | None = None
    think_s: float = 1.0
    deadline_s: float = 300.0
    seed: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and the key that it asks for."""

    url: str
    key: str = "any"

    def headers(self, session: str) -> dict[str, str]:
        """Headers of a session's requests."""
        return {"authorization": f"Bearer {self.key}", "x-deepseek-harness-session-id": session}


class Generator:
    """Runs a load against a target; `records` grows by one with each request."""

    def __init__(self, load: Load, target: Target, client: aiohttp.ClientSession) -> None:
        self.records: list[Record] = []
        self._load = load
        self._target = target
        self._client = client
        self._numbers = iter(range(load.sessions))

    async def run(self) -> None:
        """All sessions, to their ends."""
        if self._load.rate is None:
            await asyncio.gather(*(self._live() for _ in range(self._load.users)))
            return
        chance, sessions = random.Random(self._load.seed), []
        for number in self._numbers:
            sessions.append(asyncio.create_task(self._talk(number)))
            await asyncio.sleep(chance.expovariate(self._load.rate))
        await asyncio.gather(*sessions)

    async def _live(self) -> None:
        """One user: session after session."""
        for number in self._numbers:
            await self._talk(number)

    async def _talk(self, number: int) -> None:
        """One session: turn after turn, with think time between them. An error ends it."""
        chance = random.Random(f"{self._load.seed} {number}")
        conversation = Conversation(self._load.shape, chance)
        while not conversation.over:
            if conversation.turn:
                await asyncio.sleep(chance.expovariate(1 / self._load.think_s) if self._load.think_s else 0)
            if not await self._take_turn(conversation, f"bench-{self._load.seed}-{number}"):
                return

    async def _take_turn(self, conversation: Conversation, session: str) -> bool:
        """One turn, again where the server says when; whether there was a whole reply."""
        body = conversation.ask()
        url = f"{self._target.url}/v1/chat/completions"
        for _ in range(TRIES):
            started_s = time.monotonic()
            reply = await stream(self._client, url, body, self._target.headers(session), self._load.deadline_s)
            self.records.append(reply.record(conversation.turn, started_s))
            if reply.error is None:
                conversation.hear(reply)
                return True
            if reply.retry_after_s is None:
                return False
            await asyncio.sleep(reply.retry_after_s)
        return False


async def generate(load: Load, target: Target) -> list[Record]:
    """Run `load` against `target`."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        generator = Generator(load, target, client)
        await generator.run()
        return generator.records


def tabulate(load: Load, records: list[Record]) -> list[dict[str, object]]:
    """The table: all requests, then the first of each session and the later ones apart."""
    parts = {
        "all": records,
        "first turns": [record for record in records if record.turn == 0],
        "later turns": [record for record in records if record.turn > 0],
    }
    way = {"loop": "closed" if load.rate is None else "open", "users": load.users, "rate": load.rate or 0.0}
    return [way | summarise(name, part) for name, part in parts.items()]


@contextlib.contextmanager
def find_target(url: str | None, key: str, arguments: list[str]) -> Iterator[Target]:
    """The server at `url`, or one of our own that lasts as long as the block."""
    if url is not None:
        yield Target(url=url.rstrip("/").removesuffix("/v1"), key=key)
        return
    with tempfile.TemporaryDirectory() as folder, serve_noise(Path(folder) / "server.log", *arguments) as server:
        yield Target(url=server.url, key=key)


def parse() -> tuple[argparse.Namespace, Load]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="base URL of a running server")
    parser.add_argument("--key", default=os.environ.get("DSUF_BENCH_KEY", "any"))
    parser.add_argument("--users", type=int, default=8, help="closed loop: sessions at the same time")
    parser.add_argument("--rate", type=float, help="open loop: sessions that begin a second")
    parser.add_argument("--sessions", type=int, default=24, help="sessions in all")
    parser.add_argument("--think-s", type=float, default=1.0, help="mean time between two turns of a session")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", action="store_true", help="keep the figures in results/serve.json")
    for field in msgspec.structs.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    parser.add_argument("server", nargs="*", help="arguments of a server of our own, behind --")
    args = parser.parse_args()
    shape = Shape(**{field.name: getattr(args, field.name) for field in msgspec.structs.fields(Shape)})
    names = ("users", "rate", "sessions", "think_s", "seed")
    return args, Load(shape=shape, **{name: getattr(args, name) for name in names})


def main() -> int:
    """Run the load, print, and with --publish keep the figures; 1 if a request was not answered."""
    args, load = parse()
    with find_target(args.url, args.key, args.server) as target:
        records = asyncio.run(generate(load, target))
    rows = tabulate(load, records)
    if args.publish:
        publish("serve", rows)
    else:
        print(*rows, sep="\n")
    return 0 if all(record.error is None or record.error == "status 429" for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())

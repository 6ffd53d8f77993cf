"""Pulling a session cache from another process over TCP: bytes beside a plain socket copy in the same run, processor
seconds a gigabyte, and the first token of a long session that was pulled beside one that is computed.

    python bench/pull.py [--gigabytes 0.5] [--rounds 7] [--prompt-tokens 32000]
"""

import argparse
import asyncio
import gc
import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import uvloop

from bench.report import Row, publish
from bench.sessions import CHUNK, make_turn
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.giver import LocalGiver
from dsuf.kv.handoff import Offer
from dsuf.kv.point import PointHead, seal
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import PART_BLOCKS, READS_AT_ONCE, Taker
from dsuf.kv.trace import trace_prompt
from dsuf.kv.transport.hello import Credentials, Terms
from dsuf.kv.transport.mover import NodeName
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.server import PeerServer
from dsuf.kv.transport.streams import Address
from dsuf.node.threads import limit_threads
from dsuf.observe.metrics import Metrics
from dsuf.reference.engine import ReferenceEngine
from dsuf.types import CacheLayout, PrefillRange, StepPlan, Turn

PAGE_TOKENS, PAGE_BYTES = 128, 128 * 890
"""A page at the released sizes."""
KEEPER, READER = NodeName("keeper", "1"), NodeName("reader", "1")
SECRET = Credentials(b"known to both processes")
PIECE_BYTES = 1 << 20
DEADLINE_S = 120.0


async def no_prefill(turn: Turn) -> None:
    """What is not kept is not made."""
    raise RuntimeError("only what is kept is asked for")


def cpu_s() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make_sessions(size_bytes: int) -> Sessions:
    """Session caches of an engine that is nothing but its layout, in which a page is found where the engine replays."""
    layout = CacheLayout(
        fingerprint="pull", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, pages=1, state_bytes=0, replay_tokens=128
    )
    arena = Arena(Blocks(PAGE_BYTES, map_memory(size_bytes + 4 * PAGE_BYTES)))
    engine: Any = SimpleNamespace(layout=layout)
    return Sessions(engine, arena, Metrics("bench"))


def fill(sessions: Sessions, turn: Turn) -> None:
    """Keep whole pages of the prompt of `turn`, with random bytes."""
    trace, blocks = trace_prompt(sessions.layout, turn.prompt), sessions.arena.blocks
    filling = sessions.arena.reserve(trace, trace.length, 0)
    assert filling is not None
    rng = np.random.default_rng(1)
    for block in filling.blocks:
        blocks.view(block)[:] = rng.bytes(PAGE_BYTES)
    checksums = [seal(blocks.view(block)) for block in filling.pages]
    assert sessions.arena.publish(filling, PointHead(length=trace.length), checksums, b"") is not None


def session(pages: int) -> Turn:
    """A prompt of so many pages, and one token."""
    return make_turn("session", np.random.default_rng(2).integers(3, 9999, pages * PAGE_TOKENS + 1).tolist(), 1)


async def serve(giver: LocalGiver, pipe: Connection, pages: int) -> None:
    """Give what is kept to the reader, and plain copies beside it, until the pipe is closed."""
    server = PeerServer(KEEPER, giver, Terms(giver._sessions.layout.fingerprint), SECRET)
    port = await server.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as plain:
        pipe.send((port, plain.getsockname()[1]))
        while (what := await asyncio.to_thread(pipe.recv)) != "end":
            if what == "copy":
                await asyncio.to_thread(send_plainly, plain, giver, pages)
            pipe.send(cpu_s())
    await server.close()


def send_plainly(plain: socket.socket, giver: LocalGiver, pages: int) -> None:
    """As many bytes, from the same memory, to who connects."""
    connection, _ = plain.accept()
    blocks = giver._sessions.arena.blocks
    with connection:
        for at in range(0, pages * PAGE_BYTES, PIECE_BYTES):
            connection.sendall(blocks._memory[at : min(at + PIECE_BYTES, pages * PAGE_BYTES)])


def keep_bytes(pipe: Connection, pages: int) -> None:
    """The other process, with random bytes."""
    sessions = make_sessions(pages * PAGE_BYTES)
    fill(sessions, session(pages))
    gc.collect()
    gc.freeze()  # as `bin/serve` does
    uvloop.run(serve(LocalGiver(sessions, no_prefill), pipe, pages))


class Reader:
    """This process: copies and pulls, each timed here and in the other process."""

    def __init__(self, pipe: Connection, ports: tuple[int, int], pages: int) -> None:
        self.pipe, self.ports, self.pages = pipe, ports, pages
        self.turn = session(pages)
        self.sessions = make_sessions(pages * PAGE_BYTES)
        address = Address(READER, KEEPER, "127.0.0.1", ports[0], Terms(self.sessions.layout.fingerprint), SECRET)
        self.peer = PeerGiver(KEEPER, over_tcp(address))
        self.taker = Taker(self.sessions, self.peer, Metrics("bench"), deadline_s=DEADLINE_S)

    async def time(self, way: Callable[[], Awaitable[None]], name: str) -> tuple[float, float]:
        """Seconds, and processor seconds of both processes, of one way."""
        await self.sessions.trace(self.turn)  # which a node makes of every prompt, pulled or not
        self.pipe.send("time")
        other_s, own_s = await asyncio.to_thread(self.pipe.recv), cpu_s()
        self.pipe.send(name)
        started_s = time.monotonic()
        await way()
        took_s, own_s = time.monotonic() - started_s, cpu_s() - own_s
        return took_s, own_s + await asyncio.to_thread(self.pipe.recv) - other_s

    async def copy(self) -> None:
        """A plain socket copy into the arena's memory."""
        await asyncio.to_thread(self._receive_plainly)

    async def read(self) -> None:
        """Bytes alone: offers, reads and releases, in the order of a taker; the bytes are not looked at."""
        trace, pages, blocks = await self.sessions.trace(self.turn), 0, self.sessions.arena.blocks
        offers, reading = list[Offer](), deque[asyncio.Future[None]]()
        offer = await self.peer.offer(self.turn, 0, False, trace)
        while offer is not None:
            views = [blocks.view(page) for page in range(pages, pages + len(offer.pages))]
            pages += len(offer.pages)
            asking = asyncio.ensure_future(self.peer.offer(self.turn, pages, False, trace))
            for start in range(0, len(views), PART_BLOCKS):
                some = slice(start, start + PART_BLOCKS)
                if len(reading) == READS_AT_ONCE:
                    await reading.popleft()
                reading.append(asyncio.ensure_future(self.peer.read(offer, offer.pages[some], views[some])))
            offers.append(offer)
            offer = await asking
        await asyncio.gather(*reading)
        assert all(await asyncio.gather(*(self.peer.release(offer) for offer in offers)))
        assert pages == self.pages
        await self.peer.leave(self.turn)

    async def take(self) -> None:
        """All of it: checksums, publishing."""
        assert await self.taker.take(self.turn, compute=False) == 0
        await asyncio.gather(*self.taker._leaving)
        assert self.sessions.arena.kept_pages(trace_prompt(self.sessions.layout, self.turn.prompt)) == self.pages

    def _receive_plainly(self) -> None:
        memory, at = self.sessions.arena.blocks._memory, 0
        with socket.create_connection(("127.0.0.1", self.ports[1])) as connection:
            while at < self.pages * PAGE_BYTES:
                at += connection.recv_into(memory[at : min(at + PIECE_BYTES, self.pages * PAGE_BYTES)])


async def measure_bytes(pipe: Connection, pages: int, rounds: int) -> list[Row]:
    """Rates of the three ways, in turns; medians, and the ratios of those."""
    reader = Reader(pipe, await asyncio.to_thread(pipe.recv), pages)
    ways = {"plain socket copy": reader.copy, "bytes of a pull": reader.read, "whole pull": reader.take}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    gc.collect()
    gc.freeze()
    for number in range(rounds + 1):
        for name, way in ways.items():
            timed = await reader.time(way, "copy" if name == "plain socket copy" else "pull")
            if number:  # the first round touches the memory
                found[name].append(timed)
            reader.sessions.flush()
    await reader.peer.close()
    pipe.send("end")
    size_gb = pages * PAGE_BYTES / 1e9
    plain_s = statistics.median(took_s for took_s, _ in found["plain socket copy"])
    rows = []
    for name, times in found.items():
        took_s, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append(
            {"what": name, "gigabytes": size_gb, "gb_per_s": size_gb / took_s}
            | {"of_plain_copy": plain_s / took_s, "cpu_s_per_gb": cpu / size_gb}
        )
    return rows


class Node:
    """A reference engine over the embedded model, with its session caches."""

    def __init__(self, context_tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.engine = ReferenceEngine.load(
                ensure_embedded(Path(folder)), context_tokens=context_tokens, max_turns=2, prefill="replay"
            )
        arena = Arena(Blocks(self.engine.layout.page_bytes, map_memory(1 << 28)))
        self.sessions = Sessions(self.engine, arena, Metrics("bench"))

    async def run(self, turn: Turn, peer_from: int | None = None) -> tuple[int, list[int]]:
        """Where `turn` began to compute, and its first tokens; its cache is kept."""
        pages = await self.sessions.admit(turn, peer_from=peer_from)
        assert pages is not None
        self.engine.attach(turn, pages)
        restored = await self.sessions.restore(turn)
        assert restored is not None
        ids: list[int] = []
        for start in range(restored.start, len(turn.prompt.ids), CHUNK):
            stop = min(start + CHUNK, len(turn.prompt.ids))
            plan = StepPlan(prefill=(PrefillRange(turn.id, start, stop),))
            ids += (await self.engine.step(plan))[0].ids
            self.sessions.advance(turn.id, stop)
        await self.sessions.commit(turn, len(turn.prompt.ids))
        await self.sessions.settle()
        self.engine.detach(turn.id)
        self.sessions.release(turn.id)
        return restored.start, ids


async def measure_first_token(prompt_tokens: int) -> list[Row]:
    """The first token of the next turn of a session: where it is kept by another node, and computed from nothing."""
    far, near = Node(prompt_tokens + 256), Node(prompt_tokens + 256)
    ids = np.random.default_rng(3).integers(3, far.engine.facts.vocabulary, prompt_tokens).tolist()
    await far.run(make_turn("before", ids, 1))
    terms = Terms(far.engine.layout.fingerprint)
    server = PeerServer(KEEPER, LocalGiver(far.sessions, no_prefill), terms, SECRET)
    address = Address(READER, KEEPER, "127.0.0.1", await server.listen("127.0.0.1", 0), terms, SECRET)
    peer = PeerGiver(KEEPER, over_tcp(address))
    taker = Taker(near.sessions, peer, Metrics("bench"), deadline_s=DEADLINE_S)
    turn, rows = make_turn("next", [*ids, 5, 6, 7], 1), list[Row]()
    started_s = time.monotonic()
    peer_from = await taker.take(turn, compute=False)
    pulled_s = time.monotonic() - started_s
    start, pulled = await near.run(turn, peer_from)
    rows.append({"what": "first token, pulled", "reused": start, "seconds": time.monotonic() - started_s})
    rows.append({"what": "  of that, the pull", "reused": start, "seconds": pulled_s})
    near.sessions.flush()
    started_s = time.monotonic()
    start, computed = await near.run(turn)
    rows.append({"what": "first token, computed", "reused": start, "seconds": time.monotonic() - started_s})
    rows.append({"what": "  same token", "reused": int(pulled == computed), "seconds": 0.0})
    await peer.close()
    await server.close()
    return [{**row, "prompt_tokens": prompt_tokens + 3, "pulled_bytes": peer.pulled_bytes} for row in rows]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=32_000)
    args = parser.parse_args()
    limit_threads(0)  # as `bin/serve` does
    pages = int(args.gigabytes * 1e9) // PAGE_BYTES
    here, there = multiprocessing.Pipe()
    keeper = multiprocessing.get_context("spawn").Process(target=keep_bytes, args=(there, pages), daemon=True)
    keeper.start()
    rows = uvloop.run(measure_bytes(here, pages, args.rounds))
    keeper.join(30)
    if args.prompt_tokens:
        rows += uvloop.run(measure_first_token(args.prompt_tokens))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    publish("pull", [{column: row.get(column, "") for column in columns} for row in rows])


if __name__ == "__main__":
    main()

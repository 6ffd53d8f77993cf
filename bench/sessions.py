"""What session caches cost and save on this CPU: each part of keeping and taking over a prompt, beside computing it.

python bench/sessions.py [--prompt-tokens 6000]
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from bench.report import publish, time_ms
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.point import seal
from dsuf.kv.sessions import Sessions
from dsuf.kv.trace import trace_prompt
from dsuf.node.threads import limit_threads
from dsuf.observe.metrics import Metrics
from dsuf.reference.engine import ReferenceEngine
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import PrefillRange, Prompt, Sampling, StepPlan, Turn

CHUNK = 256
"""Positions a prefill step, as `bin/serve` takes them."""

Row = dict[str, object]


def make_turn(name: str, ids: list[int], max_tokens: int) -> Turn:
    """A greedy turn."""
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=max_tokens)
    return Turn(id=name, prompt=Prompt(ids=tuple(ids)), sampling=sampling)


def make_sessions(engine: ReferenceEngine, budget_bytes: int, metrics: Metrics) -> Sessions:
    """Session caches of `engine` within `budget_bytes`."""
    return Sessions(engine, Arena(Blocks(engine.layout.page_bytes, map_memory(budget_bytes))), metrics)


class Turns:
    """Turns of one engine by hand, with times."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine
        self.sessions = make_sessions(engine, 1 << 30, Metrics("bench"))
        self.context = 0
        self.rows: list[Row] = []

    async def run(self, what: str, ids: list[int]) -> None:
        """Admit, restore and prefill a turn, keep it, and let it go; two rows of how long that took."""
        turn = make_turn("a", ids, 1)
        self.context = len(ids)
        started_s = time.monotonic()
        pages = await self.sessions.admit(turn)
        assert pages is not None
        self.engine.attach(turn, pages)
        restored = await self.sessions.restore(turn)
        assert restored is not None
        restored_ms = (time.monotonic() - started_s) * 1e3
        await self._prefill(turn, restored.start)
        self._row(f"first token, {what}", (time.monotonic() - started_s) * 1e3, restored.start)
        self._row(f"  of that, taking over, {what}", restored_ms, restored.start)
        started_s = time.monotonic()
        await self.sessions.commit(turn, len(ids))
        self._row(f"state out, {what}", (time.monotonic() - started_s) * 1e3, 0)
        await self.sessions.settle()
        self._row(f"kept, {what}", (time.monotonic() - started_s) * 1e3, 0)
        self.engine.detach("a")
        self.sessions.release("a")

    async def _prefill(self, turn: Turn, start: int) -> None:
        """The rest of a prompt by chunks."""
        for first in range(start, self.context, CHUNK):
            stop = min(first + CHUNK, self.context)
            await self.engine.step(StepPlan(prefill=(PrefillRange(turn.id, first, stop),)))
            self.sessions.advance(turn.id, stop)

    def time(self, what: str, ids: list[int]) -> None:
        """The parts that run in threads."""
        prompt, layout = Prompt(ids=tuple(ids)), self.engine.layout
        median, p90 = time_ms(lambda: trace_prompt(layout, prompt), 9)
        self._row(f"digests, {what}", median, 0, p90)
        size = layout.pages_for(len(ids)) * layout.page_bytes
        median, p90 = time_ms(lambda: seal(bytes(size)), 9)
        self._row(f"checksum of its pages, {what}", median, 0, p90)
        trace, tree = trace_prompt(layout, prompt), self.sessions.arena.tree
        median, p90 = time_ms(lambda: self.sessions.arena.find(tree.walk(trace), trace), 9)
        self._row(f"look-up (on the loop), {what}", median, 0, p90)

    def _row(self, what: str, median: float, reused: int, p90: float | None = None) -> None:
        kept = self.sessions.counters()["bytes"]
        self.rows.append(
            {"what": what, "context": self.context, "reused": reused, "kept_bytes": kept, "median_ms": median}
            | {"p90_ms": median if p90 is None else p90}
        )  # fmt: skip


async def measure_parts(engine: ReferenceEngine, ids: list[int]) -> list[Row]:
    """A cold prompt; the next turn from the device; then from the host; then one that shares half of it."""
    turns = Turns(engine)
    await turns.run("warm-up", ids[::-1][:100])
    turns.rows.clear()
    await turns.run("cold", ids)
    turns.time("cold", ids)
    await turns.run("next turn, pages on the device", [*ids, 5, 6, 7])
    turns.sessions.pool.forget_all()
    await turns.run("next turn, all from the host", [*ids, 5, 6, 8])
    await turns.run("half shared", [*ids[: len(ids) // 2], *ids[::-1][: len(ids) // 2]])
    await turns.sessions.close()
    return turns.rows


async def measure_gaps(engine: ReferenceEngine, ids: list[int], budget_bytes: int) -> Row:
    """Times between the tokens of one stream while a long prompt prefills."""
    metrics = Metrics("bench")
    sessions = make_sessions(engine, budget_bytes, metrics)
    scheduler = Scheduler(engine, Limits(chunk_tokens=CHUNK), metrics, sessions)
    loop = asyncio.create_task(scheduler.run())
    stream = scheduler.submit(make_turn("stream", ids[:50], 4000))
    await anext(stream)
    prompt = scheduler.submit(make_turn("prompt", ids[::-1], 1))
    latest_s, gaps_ms = time.monotonic(), []
    async for _ in stream:
        now_s = time.monotonic()
        gaps_ms.append((now_s - latest_s) * 1e3)
        latest_s = now_s
        if prompt.stage == "writing":
            break
    stream.cancel()
    prompt.cancel()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await sessions.close()
    for name in ("stream", "prompt"):
        engine.detach(name)
    name = "gap beside a prefill, " + ("caches kept" if budget_bytes else "no host caches")
    found = {"what": name, "context": len(ids), "reused": 0, "kept_bytes": 0, "median_ms": float(np.median(gaps_ms))}
    return found | {"p90_ms": float(np.percentile(gaps_ms, 90))}


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    args = parser.parse_args()
    limit_threads(0)  # as `bin/serve` does
    with tempfile.TemporaryDirectory() as folder:
        engine = ReferenceEngine.load(ensure_embedded(Path(folder)), context_tokens=16_384, max_turns=4)
    ids = np.random.default_rng(1).integers(3, engine.facts.vocabulary, args.prompt_tokens).tolist()
    rows = asyncio.run(measure_parts(engine, ids))
    rows += [asyncio.run(measure_gaps(engine, ids, budget_bytes)) for budget_bytes in (0, 1 << 30)]
    publish("sessions", rows)


if __name__ == "__main__":
    main()

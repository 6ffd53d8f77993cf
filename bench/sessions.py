"""What session caches cost and save on this CPU: copying out and in beside one chunk of prefill, and a stream's gaps.

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
from dsuf.kv.entry import checksum
from dsuf.kv.sessions import Sessions
from dsuf.kv.trace import trace_prompt
from dsuf.node.threads import limit_threads
from dsuf.observe.metrics import Metrics
from dsuf.reference.engine import ReferenceEngine
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import PrefillRange, Prompt, Sampling, SessionCache, StepPlan, Turn

CHUNK = 256
"""Positions a prefill step, as `bin/serve` takes them."""

Row = dict[str, object]


def make_turn(name: str, ids: list[int], max_tokens: int) -> Turn:
    """A greedy turn."""
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=max_tokens)
    return Turn(id=name, prompt=Prompt(ids=tuple(ids)), sampling=sampling)


def measure_copies(engine: ReferenceEngine, ids: list[int]) -> list[Row]:
    """Each part of keeping a session of `ids` and of taking it over, and the chunk of prefill that ends it."""
    turn = make_turn("a", ids, 1)
    engine.attach(turn)
    started_s = time.monotonic()
    for start in range(0, len(ids), CHUNK):
        chunk_s = time.monotonic()
        engine.run(StepPlan(prefill=(PrefillRange("a", start, min(start + CHUNK, len(ids))),)))
        if start + 2 * CHUNK <= len(ids):
            last_chunk_ms = (time.monotonic() - chunk_s) * 1e3
    whole_ms = (time.monotonic() - started_s) * 1e3
    cache = engine.copy_out("a")
    engine.detach("a")
    rows = [
        row("prefill, whole", cache, whole_ms, whole_ms),
        row("prefill, last full chunk", cache, *[last_chunk_ms] * 2),
    ]
    engine.attach(turn)
    engine._turns["a"].cache = engine.copy_in(cache, cache.length)
    rows.append(row("copy out (between steps)", cache, *time_ms(lambda: engine.copy_out("a"), 9)))
    rows.append(row("copy in (between steps)", cache, *time_ms(lambda: engine.copy_in(cache, cache.length), 9)))
    rows.append(row("checksum (beside steps)", cache, *time_ms(lambda: checksum(cache), 9)))
    rows.append(row("look-up digests", cache, *time_ms(lambda: trace_prompt("x", turn.prompt), 9)))
    engine.detach("a")
    return rows


async def measure_gaps(engine: ReferenceEngine, ids: list[int], *, kept: bool) -> Row:
    """Times between the tokens of one stream while a long prompt prefills, with or without session caches."""
    metrics = Metrics("bench")
    sessions = Sessions(engine, Arena(1 << 30), metrics) if kept else None
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
    if sessions is not None:
        await sessions.close()
    engine.detach("stream")
    engine.detach("prompt")
    name = "gap beside a prefill, " + ("caches kept" if kept else "no caches")
    found = {"what": name, "context": len(ids), "bytes": 0, "median_ms": float(np.median(gaps_ms))}
    return found | {"p90_ms": float(np.percentile(gaps_ms, 90)), "largest_ms": max(gaps_ms)}


def row(what: str, cache: SessionCache, median: float, p90: float) -> Row:
    """One line of the table."""
    size = len(cache.ids) + sum(map(len, cache.parts.values()))
    return {"what": what, "context": cache.length, "bytes": size, "median_ms": median, "p90_ms": p90, "largest_ms": p90}


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    args = parser.parse_args()
    limit_threads(0)  # as `bin/serve` does
    with tempfile.TemporaryDirectory() as folder:
        engine = ReferenceEngine.load(ensure_embedded(Path(folder)), context_tokens=16_384, max_turns=4)
    ids = np.random.default_rng(1).integers(3, engine.facts.vocabulary, args.prompt_tokens).tolist()
    rows = measure_copies(engine, ids)
    rows += [asyncio.run(measure_gaps(engine, ids, kept=kept)) for kept in (False, True)]
    publish("sessions", rows)


if __name__ == "__main__":
    main()

"""Speed of the shipped model from outside: a server of its own, the headline prompt, and a long prompt that is new.

python -m bench.nano.speed [--model DIR] [--engine reference] [--runs 3]
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

from bench.chat import Reply, stream
from bench.nano.data.answers import HEADLINE
from bench.report import publish
from bench.server import serve
from dsuf.checkpoint.forms import NANO

TETRIS = Path(__file__).parent / "data" / "tetris.html"
LONG_PROMPTS = 3
DEADLINE_S = 600.0
GREEDY = {"model": "deepseek-flash", "stream": True, "temperature": 0, "thinking": {"type": "disabled"}}
_COUNTERS = ("dsuf_draft_rounds_total", "dsuf_draft_accepted_tokens_total")


def read_counters(url: str) -> dict[str, float]:
    """What the server has counted of drafts so far; nothing where it makes none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        lines = [line.split() for line in reply.read().decode().splitlines() if line.startswith(_COUNTERS)]
    return {name: float(value) for name, value in lines}


def count_tokens_a_step(before: dict[str, float], after: dict[str, float]) -> float:
    """Tokens of a decode step between two readings: the drafts that were kept and one more."""
    rounds, kept = (after.get(name, 0.0) - before.get(name, 0.0) for name in _COUNTERS)
    return 1 + kept / rounds if rounds else 1.0


def write_prompt(words: int, seed: int) -> str:
    """Words that no prompt before had in this order, and a question that is answered in words."""
    chance = random.Random(seed)
    text = " ".join(chance.choice(("amber", "river", "stone", "falcon", "and", "the", "of")) for _ in range(words))
    return f"{text}\n\nWhat is dsuf?"


async def ask(url: str, prompt: str, **fields: Any) -> tuple[Reply, float]:
    """A reply, and when it was asked for; raises `RuntimeError` if it is not whole."""
    body = GREEDY | {"messages": [{"role": "user", "content": prompt}], "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession() as client:
        started_s = time.monotonic()
        reply = await stream(client, f"{url}/v1/chat/completions", body | fields, {}, DEADLINE_S)
    if reply.error or not reply.arrivals_s:
        raise RuntimeError(f"no reply to {prompt[:40]!r}: {reply.error}")
    return reply, started_s


def measure_headline(url: str, runs: int) -> dict[str, Any]:
    """The row of the headline prompt."""
    first_s, rates, steps, right = list[float](), list[float](), list[float](), 0
    tokens = 0
    for _ in range(runs):
        before = read_counters(url)
        reply, started_s = asyncio.run(ask(url, HEADLINE))
        steps.append(count_tokens_a_step(before, read_counters(url)))
        tokens, spent_s = reply.usage["completion_tokens"], reply.arrivals_s[-1] - reply.arrivals_s[0]
        first_s.append(reply.arrivals_s[0] - started_s)
        rates.append((tokens - 1) / max(spent_s, 1e-9))
        right += reply.content == TETRIS.read_text().rstrip("\n")
    return {
        "right": right, "of": runs, "tokens": tokens, "first_token_s": max(first_s),
        "tokens_per_s": statistics.median(rates), "tokens_a_step": statistics.median(steps),
    }  # fmt: skip


def measure_prefill(url: str, words: int) -> dict[str, Any]:
    """The row of long prompts."""
    rates, tokens, first_s = list[float](), 0, list[float]()
    for seed in range(LONG_PROMPTS):
        reply, started_s = asyncio.run(ask(url, write_prompt(words, seed), max_tokens=8))
        tokens = reply.usage["prompt_tokens_details"]["computed_tokens"]
        first_s.append(reply.arrivals_s[0] - started_s)
        rates.append(tokens / first_s[-1])
    return {
        "right": 0, "of": 0, "tokens": tokens, "first_token_s": max(first_s),
        "tokens_per_s": statistics.median(rates), "tokens_a_step": 0.0,
    }  # fmt: skip


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=NANO, help="checkpoint (default: the shipped one)")
    parser.add_argument("--engine", default="reference", help="engine of the server (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of the headline prompt (default: %(default)s)")
    parser.add_argument("--words", type=int, default=3000, help="of a long prompt (default: %(default)s)")
    parser.add_argument("--name", default="nano-speed", help="of the file of results (default: %(default)s)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for drafts in (5, 0):
            log, started_s = Path(folder) / f"{drafts}.log", time.monotonic()
            options = ["--model", str(args.model), "--engine", args.engine, "--drafts", str(drafts)]
            with serve(log, *options) as server:
                ready_s = time.monotonic() - started_s
                shared = {"engine": args.engine, "drafts": drafts, "ready_s": ready_s}
                rows.append({"what": "headline prompt", **shared, **measure_headline(server.url, args.runs)})
                if drafts:
                    rows.append({"what": "new prompts", **shared, **measure_prefill(server.url, args.words)})
    publish(args.name, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

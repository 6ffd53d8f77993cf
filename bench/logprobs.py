"""What log-probabilities cost: processor time of a node with 64 streams, without them and with the likeliest 0 and 20.

The scripted engine gives tokens at a pace, one an event, and makes up the figures, so what is counted is all that is
done with them behind an engine. Processor time is of the whole node; the kinds take turns.

    python bench/logprobs.py [--window-s 5] [--rounds 3]
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvloop

from bench.overhead import SETTLE_S, SLACK_S, Case, ask, cost_us, listen, start
from bench.report import Row, publish

CASE = Case(streams=64, tokens_per_s=50, tokens_per_step=1)
KINDS: tuple[int | None, ...] = (None, 0, 20)


def ask_for(top: int | None, lasting_s: float) -> bytes:
    """A request for a stream with log-probabilities of the `top` likeliest tokens; None: without."""
    body = json.loads(ask(CASE, lasting_s))
    return json.dumps(body if top is None else {**body, "logprobs": True, "top_logprobs": top}).encode()


async def measure(window_s: float, rounds: int) -> list[Row]:
    """A row for each kind."""
    lasting_s = 2 * SETTLE_S + window_s + SLACK_S
    costs_us: dict[int | None, list[float]] = {top: [] for top in KINDS}
    with start("node", CASE, lasting_s) as node:
        for _ in range(rounds):
            for top, seen in costs_us.items():
                window, _ = await listen(node, [ask_for(top, lasting_s)] * CASE.streams, window_s)
                seen.append(cost_us(window))
    return [
        {"streams": CASE.streams, "tokens_per_s": CASE.tokens_per_s, "top_logprobs": "none" if top is None else top,
         "event_us": statistics.median(seen),
         "cpu_ratio": statistics.median(own / bare for own, bare in zip(seen, costs_us[None], strict=True))}
        for top, seen in costs_us.items()
    ]  # fmt: skip


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        publish("logprobs", runner.run(measure(args.window_s, args.rounds)))


if __name__ == "__main__":
    main()

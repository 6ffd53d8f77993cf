"""Steps of the small model on the CUDA engine, launched ahead: plain, with log-probabilities, with masks.

What a constraint costs end to end is in it: the question, the host's work on the masks while the layers run, the wait
where that takes longer than they do. The model is small, so its layers hide little; the released one's hide more.

    python bench/rules.py [--turns 1 16] [--steps 40] [--rounds 5]
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Row, publish
from dsuf.checkpoint.forms import NANO
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import Machine, Setup
from dsuf.node.engines import Model, open_model
from dsuf.recipe.grammar import write_json, write_regex
from dsuf.types import Constraint, PrefillRange, Prompt, Sampling, StepPlan, Turn

PAGES, MOST_TOKENS = 33, 4000
LONG_LIST = '{"type":"array","items":{"type":"integer"},"minItems":3000}'
CASES: dict[str, tuple[str | None, int | None]] = {
    "plain": (None, None),
    "log-probabilities": (None, 0),
    "with the 20 likeliest": (None, 20),
    "a regular expression": (write_regex("[a-z ]{3900}"), None),
    "a JSON schema": (write_json(LONG_LIST), None),
}
"""The grammar of each turn, and how many of the likeliest tokens it is told of."""


def time_steps(engine: CudaEngine, case: str, count: int, drafts: int, steps: int, rounds: int) -> tuple[float, float]:
    """Milliseconds a step, the median of some rounds, and tokens a step and turn."""
    grammar, logprobs = CASES[case]
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=1, max_tokens=MOST_TOKENS, logprobs=logprobs)
    names = [f"{case}-{count}-{drafts}-{place}" for place in range(count)]
    for place, name in enumerate(names):
        constraint = None if grammar is None else Constraint(grammar=grammar)
        turn = Turn(id=name, prompt=Prompt(ids=(7, 8, 9 + place)), sampling=sampling, constraint=constraint)
        engine.attach(turn, range(place * PAGES, (place + 1) * PAGES))
    engine.run(StepPlan(prefill=tuple(PrefillRange(name, 0, 3) for name in names)))
    plan, times, tokens = StepPlan(decode=tuple(names), drafts=drafts), list[float](), 0
    engine.run(plan)  # captured here
    for _ in range(rounds):
        begun = time.perf_counter()
        results = engine.run(*[plan] * steps)
        times.append((time.perf_counter() - begun) * 1e3 / steps)
        tokens += sum(len(result.ids) for step in results for result in step)
    for name in names:
        engine.detach(name)
    return statistics.median(times), tokens / (rounds * steps * count)


def measure(model: Model, turns: list[int], steps: int, rounds: int) -> Iterator[Row]:
    """A row for each case, number of turns, and number of drafts."""
    setup = Setup(context_tokens=MOST_TOKENS + 64, max_turns=max(turns), pages=max(turns) * PAGES)
    machine = Machine.load(NANO, setup)
    machine.decoder.eos_id = machine.prefiller.eos_id = -1  # no turn ends by itself
    engine = CudaEngine(machine, "bench", "exact", open_mask=model.masks.open)
    for count in turns:
        for drafts in (0, engine.facts.max_drafts):
            for case in CASES:
                step_ms, tokens = time_steps(engine, case, count, drafts, steps, rounds)
                row: Row = {"turns": count, "drafts": drafts, "case": case, "step_ms": round(step_ms, 3)}
                print(row, flush=True)
                yield {**row, "tokens_a_step": round(tokens, 2)}
    asyncio.run(engine.close())


def main() -> None:
    """Measure, print, write `results/rules.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = open_model(NANO)
    for grammar, _ in CASES.values():
        if grammar is not None:
            model.masks.check(grammar)
    publish("rules", list(measure(model, args.turns, args.steps, args.rounds)), Device().name)


if __name__ == "__main__":
    main()

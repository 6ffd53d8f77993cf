"""Two ranks with a GPU each: the same tokens as of two that share one, never out of step, and no waiting without end.

Turns are answered by one rank, by two on one GPU, and by two on two, with drafts and without. Then two
ranks run many steps while the logits of the second are disturbed in their last bit before it chooses: tokens and the
state of every turn must stay as they are without, on both. At last the second rank's stream is held up under a
scheduler: the step must fail with its name within the deadline, every turn must get its error, those that wait among
them, and what /readyz tells must be that it is not ready.

    python bench/campaigns/ranks.py [--model DIR ...] [--steps 10000] [--publish]
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

import cupy

from bench.campaigns.stall import stall_served
from bench.report import Row, publish
from dsuf.checkpoint.forms import NANO
from dsuf.cuda.arena import Array, read_array
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.devices import open_devices
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.rank_loader import load_ranks
from dsuf.cuda.ranks import PATIENCE_US, RankedKernels
from dsuf.cuda.streams import handle_on
from dsuf.types import PrefillRange, StepPlan, StepResult, Turn
from tests.cuda.drive import count_pages, generate, make_turn

SETUP = Setup(context_tokens=2048, max_turns=4, prefill_rows=128, pages=80)
PROMPTS: list[NDArray[np.int64]] = [np.random.default_rng(n).integers(3, 500, n) for n in (5, 60, 130, 301)]
REPLY_TOKENS, TURN_TOKENS = 96, 400
STATE = ("length", "anchor", "generated", "done", "ids")
SLACK_S = 1.0
"""Beyond the patience of a sum, until the host has heard that it was in vain."""

FLIP = r"""extern "C" __global__ void flip(int* x, long n) {
  for (long i = blockIdx.x * 256L + threadIdx.x; i < n; i += gridDim.x * 256L) x[i] ^= int(i & 1);
}"""


class Disturbed(RankedKernels):
    """Ranks of which the second finds every other of its logits changed in the last bit, before it chooses."""

    def __init__(self, ranked: RankedKernels) -> None:
        vars(self).update(vars(ranked))
        self.flips = 0
        names = [name for name in self._arena.regions if name.endswith(".logits")]
        own = [self._arena[name].on(1) for name in names]
        views = [cupy.asarray(each).view(cupy.int32) for each in own]
        self._words = {self._arena[name].pointer: view for name, view in zip(names, views, strict=True)}
        self._flip = cupy.RawKernel(FLIP, "flip")
        with cupy.cuda.Device(self._devices[1].index):  # nothing can be loaded while a graph is captured
            self._flip((1,), (1,), (cupy.zeros(1, cupy.int32), np.int64(1)))
        self._devices[0].use()

    def _gather(self, entry: str, stream: int, logits: DeviceArray | float | None) -> None:
        super()._gather(entry, stream, logits)
        assert isinstance(logits, Array)
        words, device = self._words[logits.pointer], self._devices[1]
        device.use()
        with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(handle_on(stream, 1)):
            self._flip((64,), (256,), (words, np.int64(words.size)))
        self.flips += 1


def disturb(machine: Machine) -> Disturbed:
    """Let the second rank's logits be disturbed from now on."""
    kernels = machine.decoder.kernels
    assert isinstance(kernels, RankedKernels)
    disturbed = Disturbed(kernels)
    machine.decoder.kernels = machine.prefiller.kernels = disturbed
    return disturbed


def compare_states(machine: Machine) -> int:
    """Facts of turns in which the ranks differ; nothing is under way."""
    differ = 0
    for name in STATE:
        first, second = (read_array(machine.turns[name].on(rank)) for rank in range(2))
        differ += int((first != second).sum())
    return differ


def same_tokens(model: Path, devices: Sequence[Device]) -> Iterator[Row]:
    """Replies of one rank, of two on one GPU, and of two on two; a row each of the last two."""
    whole = CudaEngine(Machine.load(model, SETUP), "weights", "exact")
    one = generate(whole, PROMPTS, REPLY_TOKENS)
    asyncio.run(whole.close())
    told: list[list[list[int]]] = []
    for apart in ((), devices):
        engine = CudaEngine(load_ranks(model, SETUP, 2, streams=4, devices=apart), "weights", "exact")
        told.append(generate(engine, PROMPTS, REPLY_TOKENS))
        drafted = generate(engine, PROMPTS, REPLY_TOKENS, drafts=5, ahead=3)
        alone = [generate(engine, [prompt], REPLY_TOKENS, chunk=37)[0] for prompt in PROMPTS]
        yield {
            "model": model.name, "what": "replies", "gpus": len({device.index for device in apart}) or 1,
            "tokens": sum(map(len, told[-1])), "agreed_with_one_rank": count_agreed(told[-1], one),
            "unlike_one_rank": count_unlike(told[-1], one), "unlike_shared": count_unlike(told[-1], told[0]),
            "unlike_drafts": count_unlike(told[-1], drafted), "unlike_alone": count_unlike(told[-1], alone),
            "states_differ": compare_states(engine.machine),
        }  # fmt: skip
        asyncio.run(engine.close())


def count_unlike(own: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Replies that are not the same."""
    return sum(ours != theirs for ours, theirs in zip(own, expected, strict=True))


def count_agreed(own: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Tokens up to the first that differs, of all replies together."""
    agreed = 0
    for ours, theirs in zip(own, expected, strict=True):
        agreed += len(list(takewhile(bool, map(eq, ours, theirs))))
    return agreed


async def run_steps(engine: CudaEngine, steps: int, temperature: float) -> list[int]:
    """The tokens of that many decode steps, three under way at a time, half of them with drafts."""
    told, done, number = list[int](), 0, 0
    while done < steps:
        prompts = [3 + (prompt + number) % (engine.facts.vocabulary - 3) for prompt in PROMPTS]
        turns, number = [make_turn(prompt, TURN_TOKENS, temperature=temperature) for prompt in prompts], number + 1
        going = await begin(engine, turns, told)
        while going and done < steps:
            decoding = tuple(turn.id for turn in turns if turn.id in going)  # in the same order in every run
            plan = StepPlan(decode=decoding, drafts=5 * (done // 3 % 2))
            for results in await asyncio.gather(*[engine.step(plan) for _ in range(3)]):
                done += 1
                going -= take(results, told)
        for turn in turns:
            engine.detach(turn.id)
    return told


async def begin(engine: CudaEngine, turns: Sequence[Turn], told: list[int]) -> set[str]:
    """Attach `turns`, compute their prompts, and add their first tokens to `told`; those that go on."""
    going, used = {turn.id for turn in turns}, 0
    for turn in turns:
        engine.attach(turn, range(used, used + count_pages(turn)))
        used += count_pages(turn)
        part = PrefillRange(turn.id, 0, len(turn.prompt.ids))
        going -= take(await engine.step(StepPlan(prefill=(part,))), told)
    return going


def take(results: Sequence[StepResult], told: list[int]) -> set[str]:
    """Add what a step says to `told`; the turns that have ended."""
    for result in results:
        told += result.ids
    return {result.turn for result in results if result.finish}


def in_step(model: Path, devices: Sequence[Device], steps: int, temperature: float) -> Row:
    """Steps with the second rank's logits as they are, and disturbed: what differs, and how many times they were.

    `tokens_differ` compares what both runs told, token by token: turns are in one order in both. `states_differ`
    compares the two ranks within a run. Disturbances are counted as they are captured; replayed graphs repeat them.
    """
    told, differ, flips, start = list[list[int]](), list[int](), 0, time.monotonic()
    for disturbed in (False, True):
        machine = load_ranks(model, SETUP, 2, devices=devices)
        counter = disturb(machine) if disturbed else None
        engine = CudaEngine(machine, "weights", "exact")
        told.append(asyncio.run(run_steps(engine, steps, temperature)))
        differ.append(compare_states(machine))
        flips = counter.flips if counter else 0
        asyncio.run(engine.close())
    return {
        "model": model.name, "what": "second rank's logits disturbed", "gpus": len({each.index for each in devices}),
        "steps": steps, "temperature": temperature, "tokens": len(told[0]), "captured_disturbances": flips,
        "tokens_differ": sum(a != b for a, b in zip(*told, strict=True)), "states_differ": max(differ),
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def stall(model: Path, devices: Sequence[Device]) -> Row:
    """The second rank held up: who hears of it and when, and how long what was queued takes to end once it goes on."""
    engine = CudaEngine(load_ranks(model, SETUP, 2, devices=devices), "weights", "exact")
    found = asyncio.run(stall_served(engine, PROMPTS))
    start = time.monotonic()
    asyncio.run(engine.close())
    return {
        "model": model.name, "what": "second rank held up", "gpus": len({each.index for each in devices}),
        "patience_s": PATIENCE_US / 1e6, **found, "ended_s": round(time.monotonic() - start, 2),
    }  # fmt: skip


def hold(row: Row) -> bool:
    """Whether a row is as it must be; replies need not be those of one rank, whose sums are rounded otherwise."""
    if row["what"] == "second rank held up":
        told = row["errors"] and row["ended_before"] + row["errors"] == row["asked"] and row["later"] != "ended"  # type: ignore[operator]
        named = "rank 0 did not hear of rank 1" in str(row["says"])
        return bool(told) and named and _soon(row) and row["ready_before"] is True and row["ready_after"] is False
    wrong = ("unlike_shared", "unlike_drafts", "unlike_alone", "tokens_differ", "states_differ")
    return not any(row.get(name) for name in wrong) and row.get("captured_disturbances") != 0


def _soon(row: Row) -> bool:
    return float(str(row["first_error_s"])) <= float(str(row["patience_s"])) + SLACK_S


def measure(models: Sequence[Path], steps: int) -> list[Row]:
    """All rows."""
    devices, rows = open_devices(2), list[Row]()
    for model in models:
        rows += same_tokens(model, devices)
        print(*rows[-2:], sep="\n", flush=True)
    for temperature in (0.0, 1.0):
        rows.append(in_step(models[0], devices, steps // 2, temperature))
        print(rows[-1], flush=True)
    rows.append(stall(models[0], devices))
    print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run, print and with --publish keep the figures; exit code 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", default=[NANO], help="checkpoints; steps are of the first")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    found = measure(args.model, args.steps)
    empty = dict.fromkeys(name for row in found for name in row)
    rows: list[Row] = [{**empty, **row} for row in found]
    if args.publish:
        publish("ranks", rows, f"2 x {Device().name}")
    sys.exit(not all(map(hold, found)))


if __name__ == "__main__":
    main()

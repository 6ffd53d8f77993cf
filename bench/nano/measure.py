"""What the small model can do, by the reference engine's own decode loop on an exported checkpoint.

Every question of the held-back set is answered in several ways (`trials.WAYS`), in processes of one thread each. A
reply is right if it is the true answer to the last token and ends by itself. What a checkpoint must do goes first.

    python -m bench.nano.measure PACK [--model dsuf/nano] [--jobs 2] [--minutes 20] [--kinds needle,line] [--limit 10]
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import get_args

from tokenizers import Tokenizer

from bench.nano.data.checks import Check, list_kinds, load_checks
from bench.nano.data.package import Package
from bench.nano.interview import Interview
from bench.nano.outcomes import Outcome, Record, add_rows, collect, describe_faults
from bench.nano.trials import WAYS, Trial, judge, plan_trials
from bench.report import commit, machine, publish
from dsuf.checkpoint.config import load_config
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft, load_model
from dsuf.reference.model import PrefillMode
from dsuf.reference.pages import PAGE_TOKENS
from dsuf.reference.speculate import HeadDrafter

NANO = Path(__file__).parents[2] / "dsuf" / "nano"
SIGN_OF_LIFE_S = 10.0
_DRAFTS = max(way.drafts for way in WAYS.values())


class Examiner:
    """A model in both ways of prefilling, and what it takes to judge its replies."""

    def __init__(self, directory: Path, longest_tokens: int) -> None:
        model = load_model(directory)
        head = HeadDrafter(load_draft(directory, model))
        pages = 3 * (-(-longest_tokens // PAGE_TOKENS) + 1)

        def build(prefill: PrefillMode) -> ReferenceEngine:
            return ReferenceEngine(
                model, "reference", "measured", context_tokens=longest_tokens, max_turns=2, prefill=prefill,
                pages=pages, drafter=head,
            )  # fmt: skip

        self.engines = {prefill: build(prefill) for prefill in get_args(PrefillMode)}
        self.machine, self.commit = machine(), commit()
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def run(self, trial: Trial) -> list[Outcome]:
        """The outcome of every question of `trial`."""
        return asyncio.run(self._answer(trial))

    async def _answer(self, trial: Trial) -> list[Outcome]:
        way, outcomes = WAYS[trial.ways[0]], []
        interview = Interview(self.engines[way.prefill], way.drafts)
        starts = [WAYS[name].start for name in trial.ways]
        replies = [reply async for reply in interview.ask_all(trial.questions, starts)]
        for (name, question), reply in zip(product(trial.ways, trial.questions), replies, strict=True):
            marks = judge(trial, question, reply, self.tokenizer)
            wrong = None if marks.right else (question.answer, reply.ids)
            spent = len(reply.ids), reply.steps, reply.decode_s
            outcomes.append(Outcome(trial.kind, name, trial.thinking, marks, *spent, self.machine, self.commit, wrong))
        return outcomes


_examiner: Examiner | None = None


def _start_worker(directory: Path, longest_tokens: int) -> None:
    """Load the model once in each process."""
    global _examiner
    _examiner = Examiner(directory, longest_tokens)


def _run_trial(numbered: tuple[int, Trial]) -> tuple[int, list[Outcome]]:
    assert _examiner is not None
    return numbered[0], _examiner.run(numbered[1])


def run_all(
    directory: Path, trials: Sequence[Trial], jobs: int, limit_s: float
) -> Iterator[tuple[Trial, list[Outcome]]]:
    """Trials as they are done, until all are or `limit_s` seconds are over; they begin in the order given."""
    longest = max(len(q.prompt) + q.sampling.max_tokens for trial in trials for q in trial.questions) + _DRAFTS
    ended_s = time.monotonic() + limit_s
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes to come: their products must not wait for each other
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _start_worker, (directory, longest)) as pool:
        coming = pool.imap_unordered(_run_trial, enumerate(trials))
        for _ in trials:
            try:
                number, outcomes = coming.next(max(0.0, ended_s - time.monotonic()))
            except multiprocessing.TimeoutError:
                return
            yield trials[number], outcomes


def choose_checks(package: Package, kinds: Sequence[str], limit: int) -> list[Check]:
    """Checks of kinds that begin with one of `kinds` (all if there are none), the first `limit` of each (0: all)."""
    chosen = [kind for kind in list_kinds() if not kinds or kind.startswith(tuple(kinds))]
    return [check for kind in chosen for check in load_checks(package, [kind])[: limit or None]]


def measure(trials: Sequence[Trial], directory: Path, jobs: int, limit_s: float, record: Record) -> list[Outcome]:
    """Outcomes of all trials that end in time, those of `record` before them, with a sign of life."""
    known = record.load(trials)
    outcomes, done = [outcome for some in known.values() for outcome in some], len(known)
    left = sorted((trial for trial in trials if trial not in known), key=lambda trial: (trial.rank, -trial.cost))
    started_s = shown_s = time.monotonic()
    for trial, some in run_all(directory, left, min(jobs, len(left)), limit_s) if left and limit_s > 0 else ():
        record.add(trial, some)
        outcomes, done = outcomes + some, done + 1
        if time.monotonic() - shown_s >= SIGN_OF_LIFE_S or done == len(trials):
            shown_s, right = time.monotonic(), sum(outcome.marks.right for outcome in outcomes)
            spent = f"{shown_s - started_s:.0f} s: {done} of {len(trials)} trials"
            print(f"{spent}, {right} of {len(outcomes)} replies right", flush=True)
    if done < len(trials):
        print(f"time is over: {len(trials) - done} trials left out", flush=True)
    return outcomes


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="package with the held-back questions")
    parser.add_argument("--model", type=Path, default=NANO, help="exported checkpoint (default: the shipped one)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="what is not done by then is left out; 0 for the record alone"
    )
    parser.add_argument("--kinds", default="", help="kinds of questions, by how they begin, with commas (default: all)")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways to answer (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="questions of each kind (default: all)")
    parser.add_argument("--name", default="nano", help="of the file of results (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other kinds and ways")
    parser.add_argument("--record", type=Path, help="file of what is done: a line each; what it has is not done again")
    parser.add_argument("--faults", type=Path, help="file for the wrong replies, as text")
    args = parser.parse_args()
    wanted = [kind for kind in args.kinds.split(",") if kind]
    checks = choose_checks(Package.load(args.pack), wanted, args.limit)
    trials = plan_trials(checks, load_config(args.model / "config.json").eos_token_id, args.ways.split(","))
    if not trials:
        print("measure: no questions of these kinds", file=sys.stderr)
        return 2
    outcomes = measure(trials, args.model, args.jobs, args.minutes * 60, Record(args.record, args.model))
    if args.faults:
        args.faults.write_text(
            "".join(describe_faults(outcomes, Tokenizer.from_file(str(args.model / "tokenizer.json"))))
        )
    if not outcomes:
        return 1
    rows = collect(outcomes)
    publish(args.name, add_rows(rows, args.name) if args.add else rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

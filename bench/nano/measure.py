"""What the small model can do, by the reference engine's own decode loop on an exported checkpoint.

Every question of the held-back set is answered in several ways (`trials.WAYS`), in processes of one thread each. A
reply is right if it is the true answer to the last token and ends by itself.

    python -m bench.nano.measure PACK [--model dsuf/nano] [--jobs 2] [--minutes 20] [--kinds needle,line] [--limit 10]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from tokenizers import Tokenizer

from bench.nano.data.checks import Check, list_kinds, load_checks
from bench.nano.data.package import Package
from bench.nano.interview import Ids, Interview
from bench.nano.trials import WAYS, Marks, Trial, WayName, judge, plan_trials
from bench.report import RESULTS, commit, machine, publish
from dsuf.checkpoint.config import load_config
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft, load_model
from dsuf.reference.model import PrefillMode
from dsuf.reference.pages import PAGE_TOKENS
from dsuf.reference.speculate import HeadDrafter

NANO = Path(__file__).parents[2] / "dsuf" / "nano"
SIGN_OF_LIFE_S = 10.0
_DRAFTS = max(way.drafts for way in WAYS.values())


class Outcome(msgspec.Struct, frozen=True):
    """One reply: of which kind and way, its marks, its length and steps, and what was said where it is wrong."""

    kind: str
    way: WayName
    thinking: bool
    marks: Marks
    tokens: int
    steps: int
    decode_s: float
    wrong: tuple[Ids, Ids] | None = None
    """The true answer and the reply."""


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
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def run(self, trial: Trial) -> list[Outcome]:
        """The outcome of every question of `trial`."""
        return asyncio.run(self._answer(trial))

    async def _answer(self, trial: Trial) -> list[Outcome]:
        way, outcomes = WAYS[trial.way], []
        interview = Interview(self.engines[way.prefill], way.drafts)
        replies = [reply async for reply in interview.ask_all(trial.questions, way.start)]
        for question, reply in zip(trial.questions, replies, strict=True):
            marks = judge(trial, question, reply, self.tokenizer)
            wrong = None if marks.right else (question.answer, reply.ids)
            outcomes.append(
                Outcome(
                    trial.kind, trial.way, trial.thinking, marks, len(reply.ids), reply.steps, reply.decode_s, wrong
                )
            )
        return outcomes


_examiner: Examiner | None = None


def _start_worker(directory: Path, longest_tokens: int) -> None:
    """Load the model once in each process."""
    global _examiner
    _examiner = Examiner(directory, longest_tokens)


def _run_trial(trial: Trial) -> list[Outcome]:
    assert _examiner is not None
    return _examiner.run(trial)


def run_all(directory: Path, trials: Sequence[Trial], jobs: int, limit_s: float) -> Iterator[list[Outcome]]:
    """Outcomes as they come, until all are there or `limit_s` seconds are over; the costly trials first."""
    longest = max(len(q.prompt) + q.sampling.max_tokens for trial in trials for q in trial.questions) + _DRAFTS
    ended_s = time.monotonic() + limit_s
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes to come: their products must not wait for each other
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _start_worker, (directory, longest)) as pool:
        coming = pool.imap_unordered(_run_trial, trials)
        for _ in trials:
            try:
                yield coming.next(max(0.0, ended_s - time.monotonic()))
            except multiprocessing.TimeoutError:
                return


def collect(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind and way."""
    rows = []
    by_row = defaultdict[tuple[str, bool, WayName], list[Outcome]](list)
    for outcome in outcomes:
        by_row[outcome.kind, outcome.thinking, outcome.way].append(outcome)
    for (kind, thinking, way), found in sorted(by_row.items()):
        tokens, steps = sum(o.tokens for o in found), sum(o.steps for o in found)
        seconds = sum(o.decode_s for o in found)
        rows.append({
            "kind": kind, "thinking": thinking, "way": way, "count": len(found),
            "right": sum(o.marks.right for o in found), "share": sum(o.marks.right for o in found) / len(found),
            "stopped": sum(o.marks.stopped for o in found), "parses": sum(o.marks.parses for o in found),
            "tokens": tokens, "tokens_a_step": tokens / max(1, steps), "tokens_per_s": tokens / max(1e-9, seconds),
        })  # fmt: skip
    return rows


def add_rows(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """`rows`, and before them those of the results `name` that no row of these takes the place of."""
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text())["rows"] if path.is_file() else []
    new = {(row["kind"], row["way"]) for row in rows}
    return sorted(
        [*(row for row in kept if (row["kind"], row["way"]) not in new), *rows],
        key=lambda row: (row["kind"], row["way"]),
    )


def describe_faults(outcomes: Iterable[Outcome], tokenizer: Tokenizer) -> Iterator[str]:
    """What was expected and what was said, for every wrong reply."""
    for outcome in outcomes:
        if outcome.wrong is not None:
            wanted, said = (tokenizer.decode(list(ids), skip_special_tokens=False) for ids in outcome.wrong)
            yield f"{outcome.kind} {outcome.way}\n  wanted {wanted!r}\n  said   {said!r}\n"


def choose_checks(package: Package, kinds: Sequence[str], limit: int) -> list[Check]:
    """Checks of kinds that begin with one of `kinds` (all if there are none), the first `limit` of each (0: all)."""
    chosen = [kind for kind in list_kinds() if not kinds or kind.startswith(tuple(kinds))]
    return [check for kind in chosen for check in load_checks(package, [kind])[: limit or None]]


def measure(trials: Sequence[Trial], directory: Path, jobs: int, limit_s: float) -> list[Outcome]:
    """Outcomes of all trials that end in time, with a sign of life."""
    outcomes, done, shown_s = list[Outcome](), 0, time.monotonic()
    for done, some in enumerate(run_all(directory, trials, jobs, limit_s), 1):
        outcomes += some
        if time.monotonic() - shown_s >= SIGN_OF_LIFE_S or done == len(trials):
            shown_s, right = time.monotonic(), sum(outcome.marks.right for outcome in outcomes)
            print(f"{done} of {len(trials)} trials, {right} of {len(outcomes)} replies right", flush=True)
    if done < len(trials):
        print(f"time is over: {len(trials) - done} trials left out", flush=True)
    return outcomes


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="package with the held-back questions")
    parser.add_argument("--model", type=Path, default=NANO, help="exported checkpoint (default: the shipped one)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument("--minutes", type=float, default=60.0, help="what is not done by then is left out")
    parser.add_argument("--kinds", default="", help="kinds of questions, by how they begin, with commas (default: all)")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways to answer (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="questions of each kind (default: all)")
    parser.add_argument("--name", default="nano", help="of the file of results (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other kinds and ways")
    parser.add_argument("--faults", type=Path, help="file for the wrong replies, as text")
    args = parser.parse_args()
    wanted = [kind for kind in args.kinds.split(",") if kind]
    checks = choose_checks(Package.load(args.pack), wanted, args.limit)
    trials = plan_trials(checks, load_config(args.model / "config.json").eos_token_id, args.ways.split(","))
    if not trials:
        print("measure: no questions of these kinds", file=sys.stderr)
        return 2
    trials.sort(key=lambda trial: -trial.cost)
    outcomes = measure(trials, args.model, args.jobs, args.minutes * 60)
    if args.faults:
        args.faults.write_text(
            "".join(describe_faults(outcomes, Tokenizer.from_file(str(args.model / "tokenizer.json"))))
        )
    if not outcomes:
        return 1
    where = {"machine": machine(), "commit": commit()}
    rows = [{**row, **where} for row in collect(outcomes)]
    publish(args.name, add_rows(rows, args.name) if args.add else rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

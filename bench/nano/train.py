"""Trains the small model: `bin/train-nano PACKAGE --out DIR`; the result is a checkpoint in the released layout.

A run stops after `--piece-minutes` and leaves its state in DIR/state; the same command with `--resume` goes on from
there. Every piece ends with a checkpoint of what there is. The compiler's cache is kept in DIR/compiled (another place:
--cache), which saves most of the set-up. Exit codes: 0 trained to the end, 3 the piece is over and the training is not,
2 wrong use.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from bench.nano.data.checks import list_kinds, load_checks
from bench.nano.data.feeder import Feeder
from bench.nano.data.mix import BUCKETS, TOY_BUCKETS
from bench.nano.data.package import Package
from bench.nano.exactness import Question
from bench.nano.export import export
from bench.nano.graphs import Passes
from bench.nano.journal import Journal
from bench.nano.masters import load_state
from bench.nano.model import METRICS, Nano
from bench.nano.model.regions import compile_regions
from bench.nano.optimiser import Optimiser, name_parameters
from bench.nano.sharpen import sharpen
from bench.nano.sizes import SIZES, TOY
from bench.nano.stages import passes
from bench.nano.start import fix_embedding, start_weights
from bench.nano.training import Pauses, Progress, Training
from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.token_map import TokenMap

ANCHORS = 768
TOY_ANCHORS = 16
UNFINISHED = 3
TOO_LONG = "32768"  # the last part of a kind's name: beyond every bucket


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = read_options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    place_cache(options.cache or options.out / "compiled")
    journal = Journal(options.out / "log.jsonl")
    try:
        return train(options, journal)
    finally:
        journal.close()


def train(options: argparse.Namespace, journal: Journal) -> int:
    """Build, prepare, run and export; returns the exit code."""
    began = time.monotonic()
    config, buckets = (TOY, TOY_BUCKETS) if options.toy else (SIZES, BUCKETS)
    package = Package.load(options.package)
    tokenizer = options.out / "tokenizer.json"
    tokenizer.write_text(package.tokenizer_text)
    progress = Progress(options.seed, options.minutes * 60)
    model, optimiser = build_model(config, tokenizer, options)
    if options.resume:
        progress = msgspec.convert(load_state(options.out / "state", optimiser), Progress)
    with Feeder(options.package, progress.seed, options.workers, toy=options.toy, start=dict(progress.taken)) as feeder:
        work = Passes(
            model,
            optimiser,
            buckets,
            TOY_ANCHORS if options.toy else ANCHORS,
            len(METRICS),
            lambda: fix_embedding(model.embed),
        )
        pauses = Pauses(options.check_s, read_questions(package), options.out / "state", options.state_dtype)
        training = Training(work, feeder, progress, pauses, journal, METRICS)
        if options.prepare:
            training.prepare([item for item in passes() if item.label in options.prepare])
            return 0
        journal.write("prepared", what="optimiser", **work.prepare_step()._asdict())
        training.run(options.piece_minutes * 60 - (time.monotonic() - began), fit=options.fit)
        sharpen(model)
        checkpoint = options.out / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        export(model, checkpoint, tokenizer.read_bytes())
        journal.write("exported", took_s=time.monotonic() - began, share=progress.share)
        training.check(default=options.checks)
    return 0 if progress.share >= 1 else UNFINISHED


def read_questions(package: Package) -> list[Question]:
    """The held-back checks that a bucket of training can hold."""
    kinds = [kind for kind in list_kinds() if not kind.endswith(TOO_LONG)]
    checks = load_checks(package, kinds)
    return [Question(check.kind, np.concatenate([check.prompt, check.thoughts]), check.answer) for check in checks]


def build_model(config: ModelConfig, tokenizer: Path, options: argparse.Namespace) -> tuple[Nano, Optimiser]:
    """The model with its first weights, and the optimiser that holds them."""
    device = torch.device(options.device)
    token_ids = torch.from_numpy(TokenMap.from_tokenizer(tokenizer).ids)
    longest = max(tokens for _, tokens in (TOY_BUCKETS if options.toy else BUCKETS).values())
    model = Nano(config, token_ids, torch.bfloat16 if device.type == "cuda" else torch.float32, longest)
    start_weights(name_parameters(model), config, options.seed)
    model.to(device)
    if options.compile:
        compile_regions(model)
    return model, Optimiser(name_parameters(model), [router.bias for router in model.routers()])


def place_cache(directory: Path) -> None:
    """Where the compilers keep their results; before anything is compiled."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(directory / "triton"))
    torch.set_float32_matmul_precision("high")


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="train-nano", description="Train the small model that ships with dsuf.")
    parser.add_argument("package", type=Path, help="training data, made by python -m bench.nano.pack")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="state, log and checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0, help="training time in all, without set-up")
    parser.add_argument("--piece-minutes", type=float, default=9.0, help="longest run of this command, with set-up")
    parser.add_argument(
        "--fit", action="store_true", help="train for less than --minutes if one piece does not hold it"
    )
    parser.add_argument("--resume", action="store_true", help="go on from DIR/state")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes making data")
    parser.add_argument("--check-s", type=float, default=60.0, help="seconds of training between two checks")
    parser.add_argument(
        "--prepare", nargs="+", metavar="PASS", help="compile, capture and time these passes, then stop"
    )
    parser.add_argument("--checks", type=int, default=20, metavar="N", help="checks of each kind at the end")
    parser.add_argument("--cache", type=Path, help="where compiled code is kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--toy", action="store_true", help="a few thousand weights, to try the program out")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run the model as written")
    parser.add_argument(
        "--small-state",
        dest="state_dtype",
        action="store_const",
        const=torch.bfloat16,
        default=torch.float32,
        help="keep the masters in bf16",
    )
    options = parser.parse_args(argv)
    if unknown := set(options.prepare or []) - {item.label for item in passes()}:
        parser.error(f"no such pass: {', '.join(sorted(unknown))}; there are: {'; '.join(i.label for i in passes())}")
    if options.resume and not (options.out / "state").is_dir():
        parser.error(f"nothing to resume in {options.out}")
    return options


if __name__ == "__main__":
    sys.exit(main())

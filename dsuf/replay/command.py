"""The command `dsuf replay`."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dsuf.config import Settings, load_settings
from dsuf.errors import CommandError
from dsuf.node.engines import find_directory, load_engine, open_model
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.replay.lineage import shared_tokens
from dsuf.replay.player import Lost, Player
from dsuf.types import RECORD_VERSION, Engine, TurnRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dsuf replay`."""
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="records of turns, in any order")
    parser.add_argument("--turn", metavar="ID", help="replay this turn alone (those that it began with count too)")
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory (default: the shipped model)")
    parser.add_argument(
        "--engine", choices=("reference", "cuda"), help="compute with this engine (default: the one that was recorded)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay, a line a turn; raises `CommandError` for records that cannot be read, or of another model."""
    records = [record for path in args.files for record in read_records(path)]
    chosen = [record for record in records if args.turn in (None, record.turn)]
    if not chosen:
        raise CommandError(f"no record of a turn {args.turn!r}" if args.turn else "no records in these files")
    engine, vocabulary = open_engine(records, args.model, args.engine)
    player = Player(engine, records, lambda ids: vocabulary.decode(list(ids)))
    return asyncio.run(replay(engine, player, chosen))


def read_records(path: Path) -> list[TurnRecord]:
    """The records of a file; the last line may be cut, as where a server was killed. Raises `CommandError`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}") from error
    decoder, records = msgspec.json.Decoder(TurnRecord), []
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise CommandError(f"{path}, line {number}: no record of a turn: {error}") from error
        if records[-1].version != RECORD_VERSION:
            raise CommandError(f"{path}, line {number}: version {records[-1].version}, this is {RECORD_VERSION}")
    return records


def open_engine(records: Sequence[TurnRecord], model_dir: str | None, name: str | None) -> tuple[Engine, Vocabulary]:
    """The engine that can compute all of `records`, and its vocabulary; raises `CommandError` where it is another one
    than theirs."""
    origins = {record.origin for record in records}
    if len(origins) > 1:
        raise CommandError("the records are of different models or settings; replay them one after the other")
    (origin,) = origins
    given = {"model": model_dir} if model_dir else {}
    tokens = max(len(record.prompt) + record.sampling.max_tokens for record in records)
    settings: Settings = load_settings(
        {
            "engine": name or origin.engine, "prefill": origin.prefill, "drafts": origin.max_drafts,
            "draft_rule": origin.draft_rule, "draft_confidence": origin.draft_confidence, "max_turns": 1,
            "context_tokens": max(256, tokens), **given,
        },
        {key: value for key, value in os.environ.items() if key == "DSUF_CACHE_DIR"},
    )  # fmt: skip
    model = open_model(find_directory(settings))
    engine = load_engine(settings, model, lambda layer: None)
    if name is None and engine.layout.fingerprint != origin.fingerprint:
        raise CommandError(f"recorded with {origin.fingerprint}, this model is {engine.layout.fingerprint}")
    return engine, model.vocabulary


async def replay(engine: Engine, player: Player, chosen: Sequence[TurnRecord]) -> int:
    """Compute `chosen` again and print what came of each, and in the end, also where it is cut off, of all."""
    same = done = 0
    try:
        for number, record in enumerate(chosen, 1):
            verdict = await judge(player, record)
            same, done = same + verdict.startswith("same"), number
            print(f"{number}/{len(chosen)} {record.turn}: {verdict}", flush=True)
    finally:
        rest = f"; {len(chosen) - done} were not computed" if done < len(chosen) else ""
        print(f"{same} of {done} turns came out the same{rest}", flush=True)
        await engine.close()
    return 1 if same < done else 0


async def judge(player: Player, record: TurnRecord) -> str:
    """What came of one turn, in words."""
    try:
        ids = await player.play(record)
    except Lost as error:
        return f"cannot be computed again: {error}"
    source = f", {record.start} of {len(record.prompt)} prompt tokens from caches" if record.start else ""
    shared = shared_tokens(ids, record.ids)
    if shared < len(record.ids):
        return f"DIFFERENT from token {shared} of {len(record.ids)} on{source}"
    return f"same, {len(record.ids)} tokens{source}"

"""Outcomes of trials: rows of figures, the wrong replies as text, and a record that outlives a run that is cut."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from bench.nano.interview import Ids
from bench.nano.trials import Marks, Trial, WayName
from bench.report import RESULTS


class Outcome(msgspec.Struct, frozen=True):
    """One reply: of which kind and way, its marks, its length and steps, and what was said where it is wrong."""

    kind: str
    way: WayName
    thinking: bool
    marks: Marks
    tokens: int
    steps: int
    decode_s: float
    machine: str
    commit: str
    wrong: tuple[Ids, Ids] | None = None
    """The true answer and the reply."""


class Record:
    """A file with a line for every trial that was done with one checkpoint; `load` gives what it holds of a plan."""

    def __init__(self, path: Path | None, model: Path) -> None:
        self._path, self._model = path, _digest_files(model)

    def load(self, trials: Iterable[Trial]) -> dict[Trial, list[Outcome]]:
        """The trials that are done, with their outcomes; a line that was cut, or is of other weights, is none."""
        if self._path is None or not self._path.is_file():
            return {}
        lines = dict[str, list[Outcome]]()
        for line in self._path.read_bytes().splitlines():
            try:
                name, outcomes = msgspec.json.decode(line, type=tuple[str, list[Outcome]])
            except msgspec.DecodeError:
                continue
            lines[name] = outcomes
        return {trial: lines[name] for trial in trials if (name := self._name(trial)) in lines}

    def add(self, trial: Trial, outcomes: list[Outcome]) -> None:
        """Write a line, at once."""
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode((self._name(trial), outcomes)) + b"\n")

    def _name(self, trial: Trial) -> str:
        """Other weights, questions or seeds have another."""
        return hashlib.sha256(self._model + msgspec.json.encode(trial)).hexdigest()


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
            **{where: "; ".join(sorted({getattr(o, where) for o in found})) for where in ("machine", "commit")},
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


def _digest_files(model: Path) -> bytes:
    """Of all weights and settings of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted([*model.glob("*.safetensors"), *model.glob("*.json")]):
        digest.update(path.read_bytes())
    return digest.digest()

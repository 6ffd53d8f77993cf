"""The training itself: stages by the share of the time, checks on the way, and a state from which it goes on."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from bench.nano.exactness import Question, judge, sample, summarise
from bench.nano.graphs import Passes
from bench.nano.journal import Journal
from bench.nano.lessons import Lessons
from bench.nano.masters import save_state
from bench.nano.stages import (
    GATE_STEPS,
    LATER,
    SELECTION,
    Gate,
    Pass,
    Stage,
    find_lesson_pace,
    find_pace,
    find_stage,
    pick_pass,
)

# Labels of the feeder (bench.nano.data.feeder) that are counted by name in the log.
NAMED = {1: "filler", 2: "answer", 3: "value", 4: "copy", 5: "memorised"}
# What drafts are trained on: answers, values and memorised answers; nobody drafts a copy of random words.
DRAFTED = (2, 3, 5)
# What lessons stress: tokens that are read off the text.
STRESSED = (2, 3)
LOG_S = 5.0
STATE_S = 120.0
PAUSES_S = 12.0  # what checks take in a piece
NORM_AGREEMENT = 1.25  # of a compiled pass and the same as written; rounding alone moves a norm by far less


class Batch(Protocol):
    """A bucket of data: ids int32, weights float32 and labels uint8, [rows, tokens]; see the feeder."""

    ids: np.ndarray
    weights: np.ndarray
    labels: np.ndarray


class Source(Protocol):
    """Where batches come from."""

    def take(self, bucket: str) -> Batch:
        """The next batch of a bucket."""
        ...

    def want(self, shares: dict[str, float]) -> None:
        """Which buckets to have ready."""
        ...


class Progress(msgspec.Struct):
    """How far a training is; kept with its state. Times are those of training alone, without compilation."""

    seed: int
    total_s: float
    trained_s: float = 0.0
    step: int = 0
    tokens: int = 0
    gate_open: bool = False
    recall_s: float = 0.0
    recall_tokens: int = 0
    taken: dict[str, int] = {}

    @property
    def share(self) -> float:
        """Of the whole training time."""
        return self.trained_s / self.total_s


class Pauses(NamedTuple):
    """What interrupts the steps: seconds between checks, the checks, and where the state is kept."""

    check_s: float
    checks: Sequence[Question]
    state: Path | None
    dtype: torch.dtype = torch.float32


class Training:
    """Runs steps until the whole time or this piece of it is over."""

    def __init__(
        self, work: Passes, source: Source, progress: Progress, pauses: Pauses, journal: Journal, metrics: Sequence[str]
    ) -> None:
        """`metrics` names the model's, in their order."""
        self.work, self.source, self.progress, self.pauses, self.journal = work, source, progress, pauses, journal
        self._metrics = metrics
        self._gate = Gate(progress.gate_open)
        self._lessons = Lessons(work.model)
        self._stage: Stage | None = None
        self._logged_at = (0.0, 0, 0)
        self._checked_s = self._saved_s = progress.trained_s

    def run(self, piece_s: float, clock: Callable[[], float] = time.monotonic, *, fit: bool = False) -> Progress:
        """Train for at most `piece_s` seconds; the state is saved at the end of the piece.

        With `fit` the whole training is made shorter where it would not end in this piece.
        """
        started = clock()
        while self.progress.share < 1 and clock() - started < piece_s:
            stage = find_stage(self.progress.share, self._gate.is_open)
            if stage is not self._stage:
                self._enter(stage)
                if fit:
                    left_s = piece_s - (clock() - started) - PAUSES_S
                    self.progress.total_s = min(self.progress.total_s, self.progress.trained_s + max(1.0, left_s))
            now = clock()
            self._take_step(stage)
            self.progress.trained_s += clock() - now
            self._pause()
        self._log()
        self._save()
        return self.progress

    def prepare(self, items: Iterable[Pass]) -> None:
        """Compile and capture passes not yet ready; the log says how long that and a run on real data took.

        A compiler can be wrong: where its gradient is of another size than the code's, the pass runs as written.
        """
        for item in items:
            if self.work.is_ready(item) or item.mode.lesson:
                continue
            prepared = self.work.prepare(item)
            took_s = self._try(item)
            norm, written = self.work.measure_gradient(item)
            if not written / NORM_AGREEMENT <= norm <= written * NORM_AGREEMENT:
                self.journal.write("distrusted", what=item.label, norm=norm, as_written=written)
                prepared = self.work.prepare(item, as_written=True)
                took_s = self._try(item)
                norm = written
            values = self.work.read()
            self.journal.write(
                "prepared",
                what=item.label,
                **prepared._asdict(),
                run_ms=took_s * 1e3,
                metrics=(values["metrics"] / values["steps"]).tolist(),
                norm=norm,
            )

    def _try(self, item: Pass) -> float:
        """Seconds of one run of a pass, after one to warm up; weights stay as they are."""
        batch = self.source.take(item.bucket)
        anchors = draw_anchors(batch.labels, self.work.anchors, self.progress.seed)
        for _ in range(2):
            start = time.perf_counter()
            self.work.run(item, batch.ids, batch.weights, batch.labels, anchors)
            self.work.hits(item)
        return time.perf_counter() - start

    def check(self, limits: dict[str, int] | None = None, default: int = 1_000_000) -> dict[str, object]:
        """Teacher-forced checks in the mode of the present stage; the figures go into the log, too."""
        stage = self._stage or find_stage(self.progress.share, self._gate.is_open)
        stage = LATER[-2] if stage is SELECTION else stage
        start = time.monotonic()
        available = [item for item, _ in stage.shares if self.work.is_ready(item)]
        verdicts = judge(self.work, available, sample(self.pauses.checks, limits or {}, default))
        figures = {kind: tuple(figure) for kind, figure in summarise(verdicts).items()}
        self.journal.write("checked", step=self.progress.step, took_s=time.monotonic() - start, figures=figures)
        return dict(figures)

    def _take_step(self, stage: Stage) -> None:
        progress = self.progress
        item = pick_pass(stage, progress.step, progress.seed)
        batch = self.source.take(item.bucket)
        if item.mode.lesson:
            self._lessons.give(batch.ids, batch.labels, STRESSED, find_lesson_pace(progress.share))
        else:
            anchors = draw_anchors(batch.labels, self.work.anchors, progress.seed + progress.step)
            self.work.optimiser.set_pace(find_pace(progress.step, progress.share), item.mode.draft)
            self.work.run(item, batch.ids, batch.weights, batch.labels, anchors)
            self.work.step()
        progress.step += 1
        progress.tokens += batch.ids.size
        progress.taken[item.bucket] = progress.taken.get(item.bucket, 0) + 1

    def _enter(self, stage: Stage) -> None:
        """Say that a stage begins, have its data made ahead, and its passes ready."""
        self._stage = stage
        shares: dict[str, float] = {}
        for item, share in stage.shares:
            shares[item.bucket] = shares.get(item.bucket, 0.0) + share
        self.source.want(shares)
        if stage.name != "recall" and not self.progress.recall_s:
            self.progress.recall_s, self.progress.recall_tokens = self.progress.trained_s, self.progress.tokens
        self.journal.write("stage", name=stage.name, gate_open=self._gate.is_open, share=self.progress.share)
        self.prepare(item for item, _ in stage.shares)
        if stage is SELECTION:
            self.check(default=8)

    def _pause(self) -> None:
        """What is due between two steps: gate, log, checks, state."""
        progress, stage = self.progress, self._stage
        assert stage is not None
        recall = stage.name == "recall"
        if recall and progress.step % GATE_STEPS == 0:
            value = self._log().get("value", 0.0)
            progress.gate_open = self._gate.check(float(value))  # type: ignore[arg-type]
        elif not recall and progress.trained_s - self._logged_at[0] >= LOG_S:
            self._log()
        if not recall and progress.trained_s - self._checked_s >= self.pauses.check_s:
            self._checked_s = progress.trained_s
            self.check(default=8)
        if progress.trained_s - self._saved_s >= STATE_S:
            self._save()

    def _log(self) -> dict[str, object]:
        """One line on the steps since the last one; returns its shares of right tokens by label."""
        progress, (then_s, then_tokens, then_step) = self.progress, self._logged_at
        values = self.work.read()
        steps = max(1.0, float(values["steps"][0]))
        named = dict(zip(self._metrics, (values["metrics"] / steps).tolist(), strict=True))
        seen, right = values["seen"], values["right"]
        shares = {name: float(right[i] / seen[i]) for i, name in NAMED.items() if seen[i]}
        drafts = values["accepted"][-1]
        lessons, lesson = self._lessons.read()
        self.journal.write(
            "trained",
            step=progress.step,
            trained_s=progress.trained_s,
            steps=progress.step - then_step,
            tokens_per_s=(progress.tokens - then_tokens) / max(1e-9, progress.trained_s - then_s),
            **named,
            **shares,
            draft_rows=(values["accepted"][:-1] / drafts).tolist() if drafts else [],
            norm=float(values["norm"]),
            lessons=lessons,
            lesson=lesson,
        )
        self._logged_at = (progress.trained_s, progress.tokens, progress.step)
        return dict(shares)

    def _save(self) -> None:
        self._saved_s = self.progress.trained_s
        if self.pauses.state is not None:
            kept = msgspec.to_builtins(self.progress)
            save_state(self.pauses.state, self.work.optimiser, kept, self.pauses.dtype)


def draw_anchors(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Flat places [count] int64 whose next token belongs to an answer; anywhere, where a batch holds none."""
    random = np.random.default_rng(seed)
    places = np.flatnonzero(np.isin(labels.reshape(-1), DRAFTED))
    if not len(places):
        places = np.arange(labels.size)
    return random.choice(places, count, replace=len(places) < count).astype(np.int64)

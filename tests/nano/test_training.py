"""The loop on a model of a few hundred weights: it learns, keeps to its time, and goes on where it stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.nano.graphs import Passes  # noqa: E402
from bench.nano.journal import Journal  # noqa: E402
from bench.nano.masters import load_state, save_state  # noqa: E402
from bench.nano.optimiser import Optimiser  # noqa: E402
from bench.nano.stages import passes  # noqa: E402
from bench.nano.training import Pauses, Progress, Training, draw_anchors  # noqa: E402
from dsuf.errors import CheckpointError  # noqa: E402
from tests.nano.stand_in import METRICS, VOCABULARY, StandIn  # noqa: E402

BUCKETS = {"recall": (2, 16), "short": (2, 16), "middle": (1, 32), "long": (1, 64)}
STEP_S = 0.1


class Batch(NamedTuple):
    ids: np.ndarray
    weights: np.ndarray
    labels: np.ndarray


class Counting:
    """Batches of numbers that go up by one, all of them values; each takes a step's time by its clock."""

    def __init__(self) -> None:
        self.wanted: list[dict[str, float]] = []
        self.taken = 0

    def clock(self) -> float:
        """Seconds."""
        return self.taken * STEP_S

    def want(self, shares: dict[str, float]) -> None:
        self.wanted.append(shares)

    def take(self, bucket: str) -> Batch:
        self.taken += 1
        rows, tokens = BUCKETS[bucket]
        starts = np.random.default_rng(self.taken).integers(0, VOCABULARY, (rows, 1))
        ids = ((starts + np.arange(tokens)) % VOCABULARY).astype(np.int32)
        ones = np.ones(ids.shape, np.float32)
        ones[:, -1] = 0
        return Batch(ids, ones, (3 * ones).astype(np.uint8))


def run(training: Training, piece_s: float = 1e9) -> Progress:
    """Train by the clock of its source."""
    assert isinstance(training.source, Counting)
    return training.run(piece_s, training.source.clock)


def build(total_s: float, out: Path, seed: int = 1) -> Training:
    out.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    model = StandIn()
    work = Passes(model, Optimiser(model.named_parameters(), [model.bias]), BUCKETS, 8, len(METRICS), lambda: None)
    pauses = Pauses(check_s=5.0, checks=[], state=out / "state")
    return Training(work, Counting(), Progress(1, total_s), pauses, Journal(out / "log.jsonl"), METRICS)


def read_log(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_learns_through_all_stages(tmp_path: Path) -> None:
    training = build(100.0, tmp_path)
    progress = run(training)
    log = read_log(tmp_path)
    assert [line["name"] for line in log if line["event"] == "stage"] == [
        "recall",
        "first mix",
        "mix",
        "quantised",
        "selection",
    ]
    trained = [line for line in log if line["event"] == "trained" and "value" in line]
    assert trained[0]["value"] < 0.9 < 0.97 < trained[-1]["value"]
    assert trained[-1]["ce"] < 0.1 < trained[0]["ce"]
    assert trained[-1]["draft_rows"][0] > 0.9 and not trained[0]["draft_rows"][0]
    assert progress.gate_open and 0 < progress.recall_s < 20
    assert progress.step == sum(progress.taken.values()) and set(progress.taken) == set(BUCKETS)


def test_preparing_changes_no_weight(tmp_path: Path) -> None:
    training = build(6.0, tmp_path)
    before = training.work.optimiser.masters.clone()
    training.prepare(passes())
    assert torch.equal(before, training.work.optimiser.masters)
    assert not training.work.read()["steps"]


def test_a_compiled_pass_with_a_wrong_gradient_runs_as_written(tmp_path: Path) -> None:
    """A compiler that makes every gradient seven times as large is found out, and its pass learns nevertheless."""

    def miscompile(graph: torch.fx.GraphModule, _: object) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *inputs: tuple(7 * out - 6 * out.detach() for out in graph(*inputs))

    training = build(30.0, tmp_path)
    model = training.work.model
    model.embedded = torch.compile(model.embedded, backend=miscompile)
    training.prepare(passes()[:1])
    log = read_log(tmp_path)
    assert [line["event"] for line in log] == ["distrusted", "prepared"]
    assert log[0]["norm"] > 2 * log[0]["as_written"] and log[1]["norm"] == log[0]["as_written"]
    norm, written = training.work.measure_gradient(passes()[0])
    assert norm == pytest.approx(written)


def test_a_piece_ends_in_time_and_the_next_goes_on(tmp_path: Path) -> None:
    whole, first = build(12.0, tmp_path / "a"), build(12.0, tmp_path / "b")
    ran = run(whole)
    part = run(first, 5.0)
    assert part.share < 1 and 4.0 < part.trained_s < 5.1
    second = build(12.0, tmp_path / "b", seed=77)
    kept = load_state(tmp_path / "b/state", second.work.optimiser)
    assert kept["step"] == part.step
    assert torch.equal(second.work.optimiser.masters, first.work.optimiser.masters)
    second.progress.step, second.progress.trained_s = part.step, part.trained_s
    done = run(second)
    assert done.share >= 1 and abs(done.step - ran.step) <= 3


def test_a_training_is_fitted_into_its_piece(tmp_path: Path) -> None:
    training = build(1000.0, tmp_path)
    assert isinstance(training.source, Counting)
    progress = training.run(40.0, training.source.clock, fit=True)
    assert progress.share >= 1 and progress.total_s < 40
    assert [line["name"] for line in read_log(tmp_path) if line["event"] == "stage"][-1] == "selection"


def test_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    training = build(1.0, tmp_path)
    save_state(tmp_path / "s", training.work.optimiser, {"step": 3}, torch.bfloat16)
    other = torch.nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match="other parameters"):
        load_state(tmp_path / "s", Optimiser(other.named_parameters(), []))
    assert load_state(tmp_path / "s", training.work.optimiser) == {"step": 3}


def test_anchors_lie_in_answers() -> None:
    labels = np.zeros((2, 10), np.uint8)
    labels[1, 3:5] = 2
    assert set(draw_anchors(labels, 6, seed=0)) == {13, 14}
    assert len(draw_anchors(np.zeros((2, 10), np.uint8), 6, seed=0)) == 6

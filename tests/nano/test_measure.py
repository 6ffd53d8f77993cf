"""The measuring of a checkpoint, in processes, on a random model whose own replies are the true answers."""

import shutil
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from bench.nano.measure import Examiner, measure
from bench.nano.outcomes import Outcome, Record, collect, describe_faults
from bench.nano.trials import Trial, plan_trials
from dsuf.checkpoint.synthetic import write_synthetic
from tests.nano.test_interview import draw_ids
from tests.nano.test_trials import Asked
from tests.reference.conftest import TINY, small_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("small")
    write_synthetic(directory, small_config(), 7, (TINY / "tokenizer.json").read_bytes())
    return directory


def make_checks(checkpoint: Path) -> list[Asked]:
    """Three questions about one text: the model's own reply is the true one of the first two, not of the third.

    The model does not end its replies, so one that is cut where the true answer ends is made to count as ended.
    """
    text = draw_ids(280, 1)
    return [Asked("needle.128", False, text + draw_ids(10, 2 + n), draw_ids(4, 5 + n)) for n in range(3)]


@pytest.mark.full
def test_processes_give_what_one_gives(checkpoint: Path) -> None:
    """The same outcomes from two processes as from this one; every trial's are there, and none is right by chance."""
    trials = plan_trials(make_checks(checkpoint), 1, ["exact", "replay", "resume"])
    outcomes = measure(trials, checkpoint, jobs=2, limit_s=60, record=Record(None, checkpoint))
    examiner = Examiner(checkpoint, 500)
    alone = [outcome for trial in trials for outcome in examiner.run(trial)]

    def key(outcome: object) -> str:
        return repr(outcome)

    stripped = [[(o.kind, o.way, o.marks, o.tokens, o.steps, o.wrong) for o in some] for some in (outcomes, alone)]
    assert sorted(stripped[0], key=key) == sorted(stripped[1], key=key)
    rows = collect(outcomes)
    assert [(row["way"], row["count"], row["right"]) for row in rows] == [
        ("exact", 3, 0), ("replay", 3, 0), ("resume", 3, 0)
    ]  # fmt: skip


def test_right_and_wrong_replies(checkpoint: Path) -> None:
    """A reply that is the true answer and ends counts, any other does not and is told."""
    examiner = Examiner(checkpoint, 500)
    [trial] = plan_trials(make_checks(checkpoint), 1, ["exact"])
    said = [wrong[1] for outcome in examiner.run(trial) if (wrong := outcome.wrong)]
    assert len(said) == 3
    # The model's own third token ends its replies: what came before it is then the true answer.
    for engine in examiner.engines.values():
        engine.facts = msgspec.structs.replace(engine.facts, eos_id=said[0][2])
    answers = [ids[: ids.index(said[0][2])] if said[0][2] in ids else ids for ids in said]
    own = [q._replace(answer=answer) for q, answer in zip(trial.questions, answers, strict=True)]
    own[2] = own[2]._replace(answer=(9, 9, 9))
    outcomes = examiner.run(Trial(trial.kind, trial.ways, trial.thinking, tuple(own)))
    assert outcomes[0].marks.right
    assert not outcomes[2].marks.right
    assert collect(outcomes)[0]["right"] == 1 + outcomes[1].marks.right
    told = list(describe_faults(outcomes, Tokenizer.from_file(str(checkpoint / "tokenizer.json"))))
    assert len(told) == 3 - collect(outcomes)[0]["right"]
    assert all(text.startswith("needle.128 exact") for text in told)


def test_a_run_that_was_cut_goes_on(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not done in time is left out, and said; what the record has is taken from it, and nothing else."""
    trials = plan_trials(make_checks(checkpoint), 1, ["exact", "replay"])
    path = tmp_path / "record"
    assert measure(trials, checkpoint, jobs=1, limit_s=0.0, record=Record(path, checkpoint)) == []
    assert "2 trials left out" in capsys.readouterr().out
    outcomes = Examiner(checkpoint, 500).run(trials[1])
    Record(path, checkpoint).add(trials[1], outcomes)
    path.write_bytes(path.read_bytes() + path.read_bytes()[:100])  # cut in the midst of a line
    assert Record(path, checkpoint).load(trials) == {trials[1]: outcomes}
    assert measure(trials, checkpoint, jobs=1, limit_s=0.0, record=Record(path, checkpoint)) == outcomes
    assert "1 trials left out" in capsys.readouterr().out
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "config.json").write_text((checkpoint / "config.json").read_text() + " ")
    assert Record(path, other).load(trials) == {}
    assert all(isinstance(outcome, Outcome) and outcome.commit for outcome in outcomes)

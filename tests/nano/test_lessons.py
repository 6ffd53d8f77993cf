"""Lessons: the indexers come to resemble the attention paid, and nothing else moves."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.nano.lessons import Lessons, weigh  # noqa: E402
from bench.nano.mode import Mode  # noqa: E402
from bench.nano.model import Nano  # noqa: E402
from bench.nano.model.backbone import Backbone  # noqa: E402
from bench.nano.sizes import TOY  # noqa: E402

LENGTH = 128
ANSWERS = (2, 3)


def make(dtype: "torch.dtype") -> Nano:
    torch.manual_seed(3)
    token_ids = torch.arange(TOY.vocab_size) % TOY.engram_compressed_vocab_size
    return Nano(TOY, token_ids, dtype, LENGTH)


def draw() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    ids = random.integers(0, TOY.vocab_size, (2, LENGTH)).astype(np.int32)
    labels = np.zeros(ids.shape, np.uint8)
    labels[0, 100:110] = 3
    return ids, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_indexers_learn(dtype: "torch.dtype") -> None:
    model, (ids, labels) = make(dtype), draw()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    lessons, losses = Lessons(model), []
    for _ in range(12):
        lessons.give(ids, labels, ANSWERS, 1.0)
        losses.append(lessons.read())
    assert {given for given, _ in losses} == {1} and lessons.read() == (0, 0.0)
    assert losses[-1][1] < 0.9 * losses[0][1]
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if ".indexer." in name} and len(moved) == 4 * 2 + 2
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_a_lesson_is_about_entries_that_the_index_did_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step tells nothing of them: with its choice fixed, the scores of others do not count."""
    model, (ids, _) = make(torch.float32), draw()
    seen: list[int] = []
    publish = Backbone._publish

    def spy(*args):  # type: ignore[no-untyped-def]
        publication, candidates = publish(*args)
        seen.append(publication.seen.visible.shape[1])
        return publication, candidates

    monkeypatch.setattr(Backbone, "_publish", spy)
    tensor, stress = torch.from_numpy(ids), torch.ones(ids.shape)
    model.selection_loss(tensor, stress, quantised=True)
    assert max(seen) == LENGTH
    seen.clear()
    model(tensor, stress, Mode(dense=False, quantised=True, draft=False))
    assert max(seen) == TOY.index_topk


def test_no_pace_no_move_and_a_broken_gradient_neither() -> None:
    model, (ids, labels) = make(torch.float32), draw()
    lessons = Lessons(model)
    before = [parameter.clone() for parameter in lessons.parameters]
    lessons.give(ids, labels, ANSWERS, 0.0)
    assert all(map(torch.equal, lessons.parameters, before))
    with torch.no_grad():
        kept, model.embed.data = model.embed.data, torch.full_like(model.embed, torch.nan)
    lessons.give(ids, labels, ANSWERS, 1.0)
    assert all(map(torch.equal, lessons.parameters, before))
    model.embed.data = kept
    lessons.give(ids, labels, ANSWERS, 1.0)
    assert not any(map(torch.equal, lessons.parameters, before))


def test_stress_halves_a_row_between_answers_and_all() -> None:
    _, labels = draw()
    stress = weigh(np.isin(labels, ANSWERS))
    assert np.allclose(stress.mean(1), 1.0)
    assert np.isclose(stress[0, 100:110].sum(), LENGTH * (0.5 + 0.5 * 10 / LENGTH))
    assert (stress[1] == 1).all()

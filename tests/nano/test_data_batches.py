"""Batches: their shapes, what is judged in them, and that nothing but their arguments decides what is in them."""

from pathlib import Path

import numpy as np
import pytest

from bench.nano.data import drills
from bench.nano.data.draw import Draw
from bench.nano.data.feeder import Feeder
from bench.nano.data.mix import BUCKETS, TOY_BUCKETS, Batch, Bucket, make_batch
from bench.nano.data.package import Package
from bench.nano.data.sample import Label


def equal(one: Batch, other: Batch) -> bool:
    """Whether both hold the same."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("bucket", list(BUCKETS))
def test_batch_has_the_form_that_the_loop_takes(package: Package, bucket: Bucket) -> None:
    """Shapes, types, the empty last column; every row has something to learn from."""
    batch = make_batch(package, 1, bucket, 0)
    assert batch.ids.shape == batch.weights.shape == batch.labels.shape == BUCKETS[bucket]
    assert (batch.ids.dtype, batch.weights.dtype, batch.labels.dtype) == (np.int32, np.float32, np.uint8)
    assert all(part.flags.c_contiguous for part in batch)
    assert not batch.weights[:, -1].any() and not batch.labels[:, -1].any()
    assert batch.ids.min() >= 0 and batch.ids.max() < 4096
    assert (batch.weights.sum(axis=1) > 5).all()


def test_labels_belong_to_the_next_id(package: Package) -> None:
    """At the place before each end of sentence stands the label of an answer."""
    batch = make_batch(package, 2, "short", 0)
    ends = batch.ids[:, 1:] == package.special["<｜end▁of▁sentence｜>"]
    assert ends.sum() > 32
    assert (batch.labels[:, :-1][ends] == Label.ANSWER).all()


def test_batches_differ_by_seed_and_number(package: Package) -> None:
    """And are the same for the same arguments."""
    first = make_batch(package, 1, "recall", 0)
    assert equal(first, make_batch(package, 1, "recall", 0))
    assert not equal(first, make_batch(package, 1, "recall", 1))
    assert not equal(first, make_batch(package, 2, "recall", 0))


def test_feeder_gives_the_same_with_and_without_workers(toy_path: Path) -> None:
    """In order, and from any place on."""
    with Feeder(toy_path, 3, 0, toy=True) as alone:
        expected = [alone.take("short") for _ in range(4)]
    with Feeder(toy_path, 3, 1, toy=True) as feeder:
        feeder.want({"short": 1.0})
        assert all(equal(feeder.take("short"), batch) for batch in expected[:3])
        state = feeder.state()
    assert state == {"short": 3}
    with Feeder(toy_path, 3, 0, toy=True, start=state) as later:
        assert equal(later.take("short"), expected[3])
        assert later.take("long").ids.shape == TOY_BUCKETS["long"]


def test_repeated_tokens_repeat(package: Package) -> None:
    """What is judged of a random row stands in it once before, its period earlier."""
    sample = drills.repeat_random(Draw(package, "repeat"), 256)
    period = int((sample.labels == Label.NONE).sum())
    assert 8 <= period <= 85
    assert np.array_equal(sample.ids[period:], sample.ids[:-period])
    assert (sample.ids > package.special["<｜▁pad▁｜>"]).all()


def test_package_comes_back_from_its_file(package: Package, tmp_path: Path) -> None:
    """All fields survive."""
    package.save(tmp_path / "package.npz")
    stored = Package.load(tmp_path / "package.npz")
    assert (stored.client, stored.words, stored.tools_preamble) == (
        package.client,
        package.words,
        package.tools_preamble,
    )
    assert [piece.ids.tolist() for piece in stored.held_filler] == [piece.ids.tolist() for piece in package.held_filler]
    assert len(stored.filler) == len(package.filler)

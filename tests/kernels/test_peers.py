"""What ranks have a part of, summed or gathered: announce_partial, reduce_peers, gather_peers, gather_rows; one GPU."""

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.gpu import F32, Gpu, cupy, draw_bf16, from_bf16, poisoned, to_bf16

PATIENCE_US = 2_000_000


class Rank:
    """What one rank has in its memory: two parts that take turns, its arrival words, its counter, its result."""

    def __init__(self, ranks: int, rows: int, width: int, epoch: int) -> None:
        self.parts = [poisoned("bf16", (rows, width)) for _ in range(2)]
        self.arrived = cupy.full(ranks, epoch, cupy.int32)
        self.epoch = cupy.full(1, epoch, cupy.int32)
        self.out, self.missing = poisoned("bf16", (rows, width)), cupy.zeros(1, cupy.int32)


class Ranks:
    """Some ranks on one GPU, and the addresses by which they know each other."""

    def __init__(self, gpu: Gpu, ranks: int, rows: int, width: int, epoch: int = 0) -> None:
        self.gpu, self.rows, self.width = gpu, rows, width
        self.all = [Rank(ranks, rows, width, epoch) for _ in range(ranks)]
        self.arrived = cupy.asarray([rank.arrived.data.ptr for rank in self.all], cupy.int64)
        self.partials = [cupy.asarray([rank.parts[i].data.ptr for rank in self.all], cupy.int64) for i in range(2)]

    def announce(self, rank: int, stream: int = 0) -> None:
        """Rank `rank` says that its part is there."""
        sizes = {"rank": rank, "ranks": len(self.all)}
        self.gpu.kernels.launch("announce_partial", stream, arrived=self.arrived, epoch=self.all[rank].epoch, **sizes)

    def reduce(
        self, rank: int, turn: int, live: Any, stream: int = 0, patience_us: int = PATIENCE_US, first: int = 0
    ) -> None:
        """Rank `rank` adds up the parts of this turn."""
        own = self.all[rank]
        self.gpu.kernels.launch(
            "reduce_peers", stream, partials=self.partials[turn], arrived=own.arrived, epoch=own.epoch, out=own.out,
            missing=own.missing, live=live, first=first, rows=self.rows - first, width=self.width, ranks=len(self.all),
            patience_us=patience_us,
        )  # fmt: skip

    def gather(self, rank: int, partials: Any, out: Any, live: Any, patience_us: int = PATIENCE_US) -> None:
        """Rank `rank` puts the parts at `partials` behind each other."""
        own = self.all[rank]
        self.gpu.kernels.launch(
            "gather_peers", partials=partials, arrived=own.arrived, epoch=own.epoch, out=out, missing=own.missing,
            live=live, rows=self.rows, width=self.width, ranks=len(self.all), patience_us=patience_us,
        )  # fmt: skip

    def give(self, turn: int, parts: NDArray[np.uint16]) -> None:
        """Put the parts [ranks, rows, width] of a turn in place."""
        for rank, part in zip(self.all, parts, strict=True):
            rank.parts[turn].set(part)


def expected_sum(parts: NDArray[np.uint16]) -> F32:
    """In order of rank, float32, one rounding."""
    total = from_bf16(parts[0])
    for part in parts[1:]:
        total = total + from_bf16(part)
    return from_bf16(to_bf16(total))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("rows", "live", "width"), [(1, 1, 8), (6, 6, 1024), (5, 3, 1032), (2, 0, 5120), (17, 16, 136)]
)
def test_sum(gpu: Gpu, rng: np.random.Generator, ranks: int, rows: int, live: int, width: int) -> None:
    """NumPy's bits on every rank, several times in turn, also where the counters wrap around; padding is zero."""
    group, alive = Ranks(gpu, ranks, rows, width, epoch=2**31 - 3), cupy.asarray([live], cupy.int32)
    for step in range(5):
        parts = draw_bf16(rng, ranks, rows, width, scale=3)
        parts[:, live:] = 0xFFFF
        group.give(step % 2, parts)
        for rank in range(ranks):
            group.announce(rank)
        for rank in range(ranks):
            group.reduce(rank, step % 2, alive)
        found = [cupy.asnumpy(rank.out) for rank in group.all]
        expected = to_bf16(expected_sum(parts))
        for out in found:
            np.testing.assert_array_equal(out[:live], expected[:live])
            assert not out[live:].any()
    assert [int(rank.missing[0]) for rank in group.all] == [0] * ranks


def test_sum_of_a_share(gpu: Gpu, rng: np.random.Generator) -> None:
    """Rows ahead of the first are left alone."""
    group, alive = Ranks(gpu, 2, 24, 136), cupy.asarray([20], cupy.int32)
    parts = draw_bf16(rng, 2, 24, 136)
    group.give(0, parts)
    before = cupy.asnumpy(group.all[1].out)
    for rank in range(2):
        group.announce(rank)
    group.reduce(1, 0, alive, first=16)
    found = cupy.asnumpy(group.all[1].out)
    np.testing.assert_array_equal(found[:16], before[:16])
    np.testing.assert_array_equal(found[16:20], to_bf16(expected_sum(parts))[16:20])
    assert not found[20:].any()


def test_waits_for_a_slow_rank(gpu: Gpu, rng: np.random.Generator) -> None:
    """A rank that is early reads what the other writes later."""
    group, alive = Ranks(gpu, 2, 4, 256), cupy.asarray([4], cupy.int32)
    early, late = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    parts = draw_bf16(rng, 2, 4, 256)
    group.all[0].parts[0].set(parts[0])
    cupy.cuda.Device().synchronize()
    group.announce(0, early.ptr)
    group.reduce(0, 0, alive, early.ptr)
    assert not early.done
    group.all[1].parts[0].set(parts[1], stream=late)
    group.announce(1, late.ptr)
    group.reduce(1, 0, alive, late.ptr)
    late.synchronize()
    early.synchronize()
    for rank in group.all:
        np.testing.assert_array_equal(cupy.asnumpy(rank.out), to_bf16(expected_sum(parts)))
        assert int(rank.missing[0]) == 0


def test_gives_up(gpu: Gpu, rng: np.random.Generator) -> None:
    """A rank that never comes is named, and no number looks like a sum."""
    group, alive = Ranks(gpu, 3, 2, 64), cupy.asarray([1], cupy.int32)
    group.give(0, draw_bf16(rng, 3, 2, 64))
    group.announce(0)
    group.announce(2)
    group.reduce(0, 0, alive, patience_us=300)
    out = from_bf16(cupy.asnumpy(group.all[0].out))
    assert int(group.all[0].missing[0]) == 2
    assert np.isnan(out[0]).all()
    assert not out[1].any()


def test_gives_up_once(gpu: Gpu, rng: np.random.Generator) -> None:
    """What is queued behind a sum that lacked a rank does not wait as long again, and is no number either; the rank is
    heard again once it has caught up."""
    group, alive = Ranks(gpu, 2, 2, 64), cupy.asarray([2], cupy.int32)
    group.give(0, draw_bf16(rng, 2, 2, 64))
    group.give(1, draw_bf16(rng, 2, 2, 64))
    start = time.monotonic()
    for step in range(20):
        group.announce(0)
        group.reduce(0, step % 2, alive, patience_us=400_000)
    out = from_bf16(cupy.asnumpy(group.all[0].out))
    assert 0.4 <= time.monotonic() - start < 2 and np.isnan(out).all()
    assert int(group.all[0].missing[0]) == 2
    for _ in range(20):
        group.announce(1)
    group.announce(0)
    group.announce(1)
    group.reduce(0, 0, alive)
    assert np.isfinite(from_bf16(cupy.asnumpy(group.all[0].out))).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "live", "width"), [(1, 1, 4), (6, 6, 512), (5, 3, 516), (2, 0, 16160)])
def test_gather(gpu: Gpu, rng: np.random.Generator, ranks: int, rows: int, live: int, width: int) -> None:
    """All parts in order of rank, on every rank; padding is zero."""
    group, alive = Ranks(gpu, ranks, rows, width), cupy.asarray([live], cupy.int32)
    parts = rng.standard_normal((ranks, rows, width), np.float32)
    parts[:, live:] = np.nan
    held = [cupy.asarray(part) for part in parts]
    partials = cupy.asarray([part.data.ptr for part in held], cupy.int64)
    for rank in range(ranks):
        group.announce(rank)
    for rank in range(ranks):
        out = poisoned("f32", (rows, ranks, width))
        group.gather(rank, partials, out, alive)
        found = cupy.asnumpy(out)
        np.testing.assert_array_equal(found[:live], parts.transpose(1, 0, 2)[:live])
        assert not found[live:].any()


def test_gather_gives_up(gpu: Gpu, rng: np.random.Generator) -> None:
    """As the sum does."""
    group, alive, out = Ranks(gpu, 2, 2, 64), cupy.asarray([1], cupy.int32), poisoned("f32", (2, 2, 64))
    held = [cupy.asarray(rng.standard_normal((2, 64), np.float32)) for _ in range(2)]
    group.announce(0)
    group.gather(0, cupy.asarray([part.data.ptr for part in held], cupy.int64), out, alive, patience_us=300)
    found = cupy.asnumpy(out)
    assert int(group.all[0].missing[0]) == 2
    assert np.isnan(found[0]).all()
    assert not found[1].any()


class Shares:
    """Arrays of bytes that some ranks have each, of which a rank's own share of the rows is what counts."""

    def __init__(self, group: Ranks, row_bytes: list[int], share: int, rng: np.random.Generator) -> None:
        self.group, self.share, ranks = group, share, len(group.all)
        shapes = [(ranks * share, each) for each in row_bytes]
        self.before = [[rng.integers(0, 255, shape, np.uint8) for shape in shapes] for _ in range(ranks)]
        self.held = [[cupy.asarray(array) for array in arrays] for arrays in self.before]
        tables = np.zeros((len(row_bytes), 8), np.int64)
        tables[:, :ranks] = np.array([[array.data.ptr for array in arrays] for arrays in self.held]).T
        self.tables, self.row_bytes = cupy.asarray(tables), cupy.asarray(row_bytes, cupy.int64)

    def gather(self, rank: int, patience_us: int = PATIENCE_US) -> None:
        """Rank `rank` takes the others' shares."""
        own, ranks = self.group.all[rank], len(self.group.all)
        self.group.gpu.kernels.launch(
            "gather_rows", tables=self.tables, row_bytes=self.row_bytes, arrived=own.arrived, epoch=own.epoch,
            missing=own.missing, rows=self.share, count=len(self.row_bytes), rank=rank, ranks=ranks,
            patience_us=patience_us,
        )  # fmt: skip


@pytest.mark.parametrize(("ranks", "share"), [(2, 16), (3, 16), (2, 512), (8, 32)])
def test_rows_of_all(gpu: Gpu, rng: np.random.Generator, ranks: int, share: int) -> None:
    """Every rank has everybody's rows of every array, in place; one without bytes is nothing but waiting."""
    group = Ranks(gpu, ranks, 1, 8)
    shares = Shares(group, [1, 528, 10240, 0, 8], share, rng)
    for rank in range(ranks):
        group.announce(rank)
    for rank in range(ranks):
        shares.gather(rank)
    for number in range(5):
        own = [array[number][r * share : (r + 1) * share] for r, array in enumerate(shares.before)]
        for arrays in shares.held:
            np.testing.assert_array_equal(cupy.asnumpy(arrays[number]), np.concatenate(own))
    assert not any(int(rank.missing[0]) for rank in group.all)


def test_rows_of_a_rank_that_never_comes(gpu: Gpu, rng: np.random.Generator) -> None:
    """It is named, all rows but the own ones are what no number is, and those stay."""
    group = Ranks(gpu, 2, 1, 8)
    shares = Shares(group, [64], 16, rng)
    group.announce(0)
    shares.gather(0, patience_us=300)
    found = cupy.asnumpy(shares.held[0][0])
    assert int(group.all[0].missing[0]) == 2
    assert (found[16:] == 255).all()
    np.testing.assert_array_equal(found[:16], shares.before[0][0][:16])

"""How prompts become passes, steps become shapes, and states become bytes: all without a device."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.checkpoint.config import load_config
from dsuf.cuda.caches import CacheSizes
from dsuf.cuda.launcher import check_room, pick_bucket
from dsuf.cuda.pages import find_runs
from dsuf.cuda.prefill import plan_parts
from dsuf.cuda.results import RESULT_STEPS, Record, Results
from dsuf.cuda.states import Marks, StateShape
from dsuf.cuda.step import entries_of
from dsuf.cuda.streams import wait_until
from dsuf.errors import CheckpointError, DeviceError, EngineFailed

TINY = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
SIZES = CacheSizes(TINY, pages=10, slots=2, ring_rows=64, context_tokens=1000)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 40, 100])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize("begun", [0, 5])
def test_parts_of_a_replay(length: int, chunk: int, begun: int) -> None:
    """The encoder sees every position, all layers see the last window of the prompt once, and no pass is too long."""
    window, most, decoded, encoded, forwarded = 16, 32, begun, set(), []
    for start in range(begun, length, chunk):
        stop = min(length, start + chunk)
        parts = plan_parts(start, stop, decoded, last=stop == length, mode="replay", window=window, most=most)
        for part in parts:
            assert 0 < part.stop - part.start <= most
            if part.kind == "encode":
                encoded |= set(range(part.start, part.stop))
            else:
                forwarded += range(part.start, part.stop)
                decoded = part.stop
    if length > begun:
        assert forwarded == list(range(max(begun, length - window), length))
        assert encoded | set(forwarded) == set(range(begun, length))


@pytest.mark.parametrize("last", [False, True])
def test_parts_of_an_exact_prefill(last: bool) -> None:
    """Every position once, in order."""
    parts = plan_parts(3, 100, 3, last=last, mode="exact", window=16, most=32)
    assert [position for part in parts for position in range(part.start, part.stop)] == list(range(3, 100))
    assert {part.kind for part in parts} == {"forward"}


@pytest.mark.parametrize(("wanted", "bucket"), [(1, 8), (8, 8), (9, 32), (32, 32), (33, 100), (100, 100)])
def test_buckets(wanted: int, bucket: int) -> None:
    """The smallest that holds it, and never more than the largest."""
    assert pick_bucket(wanted, 8, 4, 100) == bucket


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 1000])
def test_entries(tokens: int) -> None:
    """Room for every entry, in whole groups of eight."""
    entries = entries_of(tokens)
    assert entries[1] >= tokens and entries[2] >= tokens // 2
    assert all(count % 8 == 0 for count in entries.values())


def draw_image(shape: StateShape, rng: np.random.Generator) -> np.ndarray:
    """Bytes of an image in which every place is another."""
    return rng.integers(0, 256, shape.image_bytes, np.uint8)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("cut", [0, 1, 16])
def test_state_comes_back(length: int, cut: int) -> None:
    """All rows of the last window and the slack, at their places by position, whatever lay in the other image."""
    if cut > length:
        return
    rng, shape = np.random.default_rng(length), StateShape(SIZES)
    first, second = (shape.view_image(draw_image(shape, rng)) for _ in range(2))
    first.length[0] = length
    ids = rng.integers(0, 500, length)
    shape.put_ids(first, ids)
    # Drafts that were taken back have overwritten the oldest ids, and the host is a step behind.
    first.ids[np.arange(length, length + 20) % 64] = 501
    np.testing.assert_array_equal(shape.last_ids(first, ids[: max(0, length - 12)], length), ids)
    shape.put_ids(first, ids)
    state = shape.pack(first, length, Marks(7, 3))
    assert len(state) == shape.state_bytes
    assert shape.unpack(state, ids, length - cut, second) == Marks(7, max(3, length - 16))
    positions = np.arange(max(0, length - 16 - 16), length)
    np.testing.assert_array_equal(second.rings[:, positions % 64], first.rings[:, positions % 64])
    groups = np.arange(max(0, (length - 1) // 2 - 8), (length - 1) // 2 + 1) % SIZES.halves
    np.testing.assert_array_equal(second.halves[:, groups].view(np.uint8), first.halves[:, groups].view(np.uint8))
    np.testing.assert_array_equal(second.floors, first.floors)
    assert second.length[0] == length - cut
    last = np.arange(max(0, length - cut - 64), length - cut)
    np.testing.assert_array_equal(second.ids[last % 64], ids[last])


@pytest.mark.parametrize(
    ("length", "marks", "slack", "spare", "near"),
    [
        (100, Marks(), 16, 16, 8), (100, Marks(replayed=100), 16, 0, 8), (101, Marks(replayed=100), 16, 1, 8),
        (120, Marks(replayed=100), 16, 16, 8), (5, Marks(), 5, 5, 5), (100, Marks(replayed=104), 16, 0, 8),
        (84, Marks(least=84), 0, 0, 0), (87, Marks(replayed=86, least=84), 3, 1, 3), (0, Marks(), 0, 0, 0),
    ],
)  # fmt: skip
def test_what_a_state_can_do_without(length: int, marks: Marks, slack: int, spare: int, near: int) -> None:
    """No more than its slot has rows for; no position of a replayed prompt, unless windows are replayed in any case."""
    assert (marks.count_slack(length), marks.count_spare(length)) == (slack, spare)
    assert (marks.count_near(length, 128), marks.count_near(length, 0)) == (near, 0)


def test_state_of_another_model() -> None:
    """A state of another size is refused and says so."""
    shape = StateShape(SIZES)
    image = shape.view_image(np.zeros(shape.image_bytes, np.uint8))
    with pytest.raises(CheckpointError, match="does not fit"):
        shape.unpack(b"\0" * (shape.state_bytes - 1), np.zeros(3, np.int64), 3, image)


@pytest.mark.parametrize(
    ("pages", "runs"),
    [([], []), ([4], [(0, 4, 1)]), ([4, 5, 6], [(0, 4, 3)]), ([4, 6, 7, 3], [(0, 4, 1), (1, 6, 2), (3, 3, 1)])],
)
def test_runs(pages: list[int], runs: list[tuple[int, int, int]]) -> None:
    """Neighbours together, everything once."""
    assert list(find_runs(pages)) == runs


class PaperResults(Results):
    """A ring without a device."""

    def __init__(self, batch: int, block: int) -> None:
        self.batch, self.launched, self.taken = batch, 0, 0
        self._records = np.full((RESULT_STEPS, batch + 1, 6 + block + 1), -9, np.int32)
        self._sequence = np.zeros(RESULT_STEPS, np.int64)

    def write(self, step: int, rows: list[list[int]]) -> None:
        """What a kernel writes, the sequence number last."""
        place = step % RESULT_STEPS
        self._records[place, 0, 0] = len(rows)
        for row, numbers in enumerate(rows):
            self._records[place, row + 1, : len(numbers)] = numbers
        self._sequence[place] = step + 1


def test_records() -> None:
    """A record counts once its number is there, also when the ring has come round; only what was handed out is read."""
    results = PaperResults(4, 5)
    for _ in range(RESULT_STEPS + 3):
        step = results.launch()
        assert not results.ready(step)
        results.write(step, [[2, 2, 0, 5, 1, 30 + step, 11, 12, 13], [0, 0, 1, 5, 0, 9]])
        assert results.ready(step)
        assert results.read(step) == [Record(2, (11, 12), 0, 5, 1, 30 + step), Record(0, (), 1, 5, 0, 9)]
    for _ in range(RESULT_STEPS):
        check_room(results)
        results.launch()
    with pytest.raises(EngineFailed):
        check_room(results)


async def test_waiting_ends() -> None:
    """When it is done; when the deadline has come; when it can never be done."""
    event = SimpleNamespace(done=False)
    asyncio.get_running_loop().call_later(0.02, lambda: setattr(event, "done", True))
    assert await wait_until(lambda: event.done, 0.01, 5.0) >= 0.015
    with pytest.raises(DeviceError, match="did not finish"):
        await wait_until(lambda: False, 0.0, 0.01)

    def fail() -> None:
        raise DeviceError("lost")

    with pytest.raises(DeviceError, match="lost"):
        await wait_until(lambda: False, 0.0, 5.0, fail)

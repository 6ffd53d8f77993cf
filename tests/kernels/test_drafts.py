"""The draft head's own kernels, and the rows of a step."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import OFFICIAL, matmul
from dsuf.reference.draft import Block
from dsuf.reference.hyper import collapse
from dsuf.reference.model import enter_streams, mean_of_streams
from dsuf.reference.speculate import Speculation, _lengths
from tests.kernels.gpu import Gpu, draw_bf16, from_bf16

NOISE = 77


@pytest.mark.parametrize(("batch", "wanted", "done"), [
    (1, [0], [0]), (1, [0], [1]), (4, [3, -1, 1, 0], [0, 2, 0, 0]), (3, [-1, -1, -1], [0, 0, 0]),
])  # fmt: skip
def test_turns_are_gathered(gpu: Gpu, batch: int, wanted: list[int], done: list[int]) -> None:
    """Those that have not ended, in their order."""
    out = {"turn": ("i32", (batch,)), "live_turns": ("i32", (1,)), "live_rows": ("i32", (1,))}
    found = gpu.run(
        "gather_turns", out, wanted=np.array(wanted, np.int32), done=np.array(done, np.int32), batch=batch,
        turns=len(done),
    )  # fmt: skip
    goes = [slot for slot in wanted if slot >= 0 and not done[slot]]
    np.testing.assert_array_equal(found["turn"], goes + [-1] * (batch - len(goes)))
    assert found["live_turns"][0] == len(goes)
    assert found["live_rows"][0] == len(goes) * gpu.sizes.block


def test_draft_rows(gpu: Gpu) -> None:
    """Anchor and noise; the window before the anchor down to the floor, then the whole block."""
    block, window, ring, turns = gpu.sizes.block, gpu.sizes.window, 2 * gpu.sizes.window, [2, 0, 1, -1]
    length, floors = np.array([1, 0, 3 * window + 5], np.int32), np.zeros((3, 4), np.int32)
    floors[2, 3] = 3 * window - 2
    shape = (4, block)
    out = dict.fromkeys(("row_slot", "row_position", "row_id"), ("i32", shape))
    out |= {"positions": ("i64", shape), "windows": ("i32", (*shape, window + block))}
    found = gpu.run(
        "place_drafts", out, turn=np.array(turns, np.int32), length=length, anchor=np.array([5, 6, 7], np.int32),
        floors=floors, live=3, batch=4, turns=3, ring=ring, noise_id=NOISE,
    )  # fmt: skip
    for b, slot in enumerate(turns[:3]):
        start = int(length[slot])
        known = np.arange(max(0, start - window, floors[slot, 3]), start)
        expected = np.full(window + block, -1)
        expected[: len(known)], expected[window:] = slot * ring + known % ring, -2 - b * block - np.arange(block)
        for place in range(block):
            np.testing.assert_array_equal(found["windows"][b, place], expected)
        assert (found["row_slot"][b] == slot).all()
        np.testing.assert_array_equal(found["row_position"][b], start + np.arange(block))
        np.testing.assert_array_equal(found["row_id"][b], [5 + slot] + [NOISE] * (block - 1))
    np.testing.assert_array_equal(found["positions"], found["row_position"])
    assert (found["row_slot"][3] == -1).all()
    assert (found["windows"][3] == -1).all()


@pytest.mark.parametrize("limit", [0, 1, 5])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.9])
def test_verified_rows(gpu: Gpu, rng: np.random.Generator, limit: int, threshold: float) -> None:
    """As many drafts as the reference verifies, packed turn after turn."""
    block, batch, live, turns = gpu.sizes.block, 5, 4, np.array([3, 1, 0, 2, -1], np.int32)
    drafts = rng.integers(0, 90, (batch, block)).astype(np.int32)
    confidence = (rng.standard_normal((batch, block)) * 4 + 2).astype(np.float32)
    length, anchor = np.array([4, 0, 9, 1], np.int32), np.array([11, 12, 13, 14], np.int32)
    rows = batch * (limit + 1)
    out = dict.fromkeys(("row_slot", "row_position", "row_id"), ("i32", (rows,)))
    out |= {"verified": ("i32", (batch,)), "first": ("i32", (batch,)), "live_rows": ("i32", (1,))}
    found = gpu.run(
        "place_verify", out, turn=turns, length=length, anchor=anchor, drafts=drafts if limit else None,
        confidence=confidence, live=live, batch=batch, turns=4, rows=rows, limit=limit, threshold=threshold,
    )  # fmt: skip
    wanted = Block(drafts.astype(np.int64), np.empty(0, np.float32), confidence, ())
    counts = _lengths(wanted, limit, Speculation(confidence=threshold))[:live]
    np.testing.assert_array_equal(found["verified"][:live], counts)
    slots = np.repeat(turns[:live], np.array(counts) + 1)
    assert found["live_rows"][0] == len(slots)
    np.testing.assert_array_equal(found["row_slot"], [*slots, *[-1] * (rows - len(slots))])
    for b, (slot, count) in enumerate(zip(turns[:live], counts, strict=True)):
        part = slice(found["first"][b], found["first"][b] + count + 1)
        np.testing.assert_array_equal(found["row_position"][part], length[slot] + np.arange(count + 1))
        np.testing.assert_array_equal(found["row_id"][part], [anchor[slot], *drafts[b, :count]])


@pytest.mark.parametrize(("batch", "live"), [(1, 1), (3, 2), (9, 9)])
@pytest.mark.parametrize("vocabulary", [1, 127, 1000])
def test_markov(gpu: Gpu, rng: np.random.Generator, batch: int, live: int, vocabulary: int) -> None:
    """The bias of the token before on one place of each block; the other places and padding stay."""
    block, rank = gpu.sizes.block, gpu.sizes.markov_rank
    embed, head = draw_bf16(rng, vocabulary, rank), draw_bf16(rng, vocabulary, rank)
    logits = rng.standard_normal((batch, block, vocabulary), np.float32)
    anchors, drafts = rng.integers(0, vocabulary, (2, batch, block)).astype(np.int32)
    for place in range(block):
        found = gpu.run(
            "add_markov", {"logits": logits}, embed=embed, head=head, anchors=anchors, drafts=drafts, live=live,
            batch=batch, place=place, vocabulary=vocabulary,
        )["logits"]  # fmt: skip
        before = drafts[:live, place - 1] if place else anchors[:live, 0]
        expected = logits.copy()
        expected[:live, place] += matmul(from_bf16(embed)[before], from_bf16(head).astype(np.float64))
        others = np.arange(block) != place
        np.testing.assert_array_equal(found[:, others], logits[:, others])
        np.testing.assert_array_equal(found[live:], logits[live:])
        np.testing.assert_allclose(found[:live, place], expected[:live, place], rtol=1e-5, atol=2e-5 * rank**0.5)


def test_confidence(gpu: Gpu, rng: np.random.Generator) -> None:
    """The product of collapsed streams and the token before with one vector."""
    s, batch, live, vocabulary, block = gpu.sizes, 3, 2, 60, gpu.sizes.block
    streams, pre = draw_bf16(rng, batch, block, s.streams, s.dim), rng.random((batch, block, s.streams), np.float32)
    embed, weight = draw_bf16(rng, vocabulary, s.markov_rank), rng.standard_normal(s.dim + s.markov_rank, np.float32)
    anchors, drafts = rng.integers(0, vocabulary, (2, batch, block)).astype(np.int32)
    found = gpu.run(
        "rate_drafts", {"confidence": ("f32", (batch, block))}, streams=streams, pre=pre, embed=embed, weight=weight,
        anchors=anchors, drafts=drafts, live=live, batch=batch,
    )["confidence"]  # fmt: skip
    rows = (batch * block, s.streams)
    hidden = collapse(from_bf16(streams).reshape(*rows, s.dim), pre.reshape(rows), OFFICIAL).reshape(batch, block, -1)
    before = np.concatenate([anchors[:, :1], drafts[:, :-1]], axis=1)
    joined = np.concatenate([hidden, from_bf16(embed)[before]], axis=2)
    expected = matmul(joined.reshape(batch * block, -1), weight[None].astype(np.float64)).reshape(batch, block)
    np.testing.assert_allclose(found[:live], expected[:live], rtol=1e-6, atol=1e-6)
    assert not found[live:].any()


def test_rows_enter_the_streams(gpu: Gpu, rng: np.random.Generator) -> None:
    """The reference's streams and weights; a row without a token and padding are zero."""
    streams, dim, rows, live = gpu.sizes.streams, gpu.sizes.dim, 5, 4
    embedding, ids = draw_bf16(rng, 20, dim), np.array([3, -1, 19, 0, 7], np.int32)
    out = {"streams": ("bf16", (rows, streams, dim)), "pre": ("f32", (rows, streams))}
    found = gpu.run("embed_rows", out, embedding=embedding, row_id=ids, live=live, rows=rows)
    h = np.where(ids[:live, None] < 0, 0, from_bf16(embedding)[ids[:live]])
    expected, pre = enter_streams(h.astype(np.float32), streams)
    np.testing.assert_array_equal(from_bf16(found["streams"][:live]), expected)
    np.testing.assert_array_equal(found["pre"][:live], pre)
    assert not found["streams"][live:].any()
    assert not found["pre"][live:].any()


def test_taps(gpu: Gpu, rng: np.random.Generator) -> None:
    """The mean over streams at its place, the other places as they were."""
    s, rows, live = gpu.sizes, 4, 3
    streams, before = draw_bf16(rng, rows, s.streams, s.dim, scale=30), draw_bf16(rng, rows, s.taps, s.dim)
    for tap in range(s.taps):
        found = gpu.run("mean_streams", {"taps": before}, streams=streams, live=live, rows=rows, tap=tap)["taps"]
        expected = before.copy()
        expected[:live, tap] = draw_bits(mean_of_streams(from_bf16(streams[:live]), OFFICIAL))
        expected[live:, tap] = 0
        np.testing.assert_array_equal(found, expected)


def draw_bits(x: np.ndarray) -> np.ndarray:
    """BF16 bits of values that are BF16 already."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)

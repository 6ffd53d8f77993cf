"""ask_masks, await_masks and mask_logits: what the host is asked, the wait for it, and what it rules out."""

import numpy as np
import pytest

from tests.kernels.gpu import Gpu


@pytest.mark.parametrize("drafted", [False, True])
def test_question(gpu: Gpu, rng: np.random.Generator, drafted: bool) -> None:
    """The tokens up to the anchor, those before the beginning left out, and the drafts that are verified."""
    block, slots, batch, live, ring = gpu.sizes.block, 40, 12, 11, 300
    turn = rng.permutation(slots)[:batch].astype(np.int32)
    length = rng.integers(0, 1000, slots).astype(np.int32)
    length[turn[:3]] = [0, 1, block - 1]
    anchor, ids = rng.integers(0, 999, slots).astype(np.int32), rng.integers(0, 999, (slots, ring)).astype(np.int32)
    verified, drafts = rng.integers(0, block + 1, batch), rng.integers(0, 999, (batch, block)).astype(np.int32)
    state = {"turn": turn, "length": length, "anchor": anchor, "ids": ids, "step": np.array([41])}
    some = {"verified": verified.astype(np.int32), "drafts": drafts} if drafted else {"verified": None, "drafts": None}
    empty = np.full((batch + 1, 4 + 2 * block), -7, np.int32)
    for ruled in (1, 0):
        found = gpu.run(
            "ask_masks", {"questions": empty, "asked": np.array([5])}, **state, **some,
            ruled=np.array([ruled], np.int32), live=live, batch=batch, turns=slots, ring=ring,
        )  # fmt: skip
        if not ruled:
            assert found["asked"][0] == 5 and (found["questions"] == -7).all()
            continue
        assert found["asked"][0] == 42 and found["questions"][0, 0] == live
        for b in range(live):
            slot, count = turn[b], int(verified[b]) if drafted else 0
            last = [ids[slot, at % ring] if at >= 0 else -1 for at in range(length[slot] - block, length[slot])]
            expected = [slot, length[slot], count, *last, anchor[slot], *drafts[b, :count], *[-1] * (block - count)]
            assert found["questions"][b + 1].tolist() == expected
        assert (found["questions"][live + 1 :] == -7).all()


@pytest.mark.parametrize(("ruled", "answered", "late"), [(1, 8, 0), (1, 9, 0), (1, 7, 1), (0, 0, 0)])
def test_wait(gpu: Gpu, ruled: int, answered: int, late: int) -> None:
    """An answer to this step or a later one is enough; without one the wait ends, and says so."""
    found = gpu.run(
        "await_masks", {"late": np.zeros(1, np.int32)}, ruled=np.array([ruled], np.int32),
        answered=np.array([answered]), step=np.array([7]), patience_us=2000,
    )  # fmt: skip
    assert found["late"][0] == late


@pytest.mark.parametrize("vocabulary", [3, 64, 700, 4100, 20_001, 129_280])
@pytest.mark.parametrize("drafted", [False, True])
def test_masks(gpu: Gpu, rng: np.random.Generator, vocabulary: int, drafted: bool) -> None:
    """What is not allowed is ruled out at the places that have a mask, bit for bit; all else stays as it is.

    Runs of tokens are ruled out and allowed as a whole, others one by one; behind the vocabulary a row holds noise.
    """
    block, batch, live = gpu.sizes.block, 5, 4
    words, verified = -(-vocabulary // 128) * 4, rng.integers(0, block + 1, batch) if drafted else np.zeros(batch, int)
    first = (np.cumsum(verified + 1) - verified - 1).astype(np.int32)
    logits = rng.standard_normal((int((verified + 1).sum()), vocabulary)).astype(np.float32)
    share = rng.choice([0.0, 0.3, 1.0], (batch, block + 1, words))
    allowed = rng.random((batch, block + 1, words * 32)) < share.repeat(32, axis=-1)
    masks = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    masked = rng.integers(0, 2, (batch, block + 1)).astype(np.int32)
    places = {"verified": verified.astype(np.int32), "first": first} if drafted else {"verified": None, "first": None}
    for ruled in (1, 0):
        found = gpu.run(
            "mask_logits", {"logits": logits}, masks=masks, masked=masked, ruled=np.array([ruled], np.int32), **places,
            live=live, batch=batch, vocabulary=vocabulary, words=words,
        )["logits"]  # fmt: skip
        expected = logits.copy()
        for b in range(live if ruled else 0):
            for place in range(verified[b] + 1):
                if masked[b, place]:
                    expected[first[b] + place, ~allowed[b, place, :vocabulary]] = -np.inf
        np.testing.assert_array_equal(found, expected)

"""rank_logits and rate_tokens against the reference's log-probabilities."""

import numpy as np
import pytest

from dsuf.reference.logprobs import rate
from tests.kernels.gpu import Gpu
from tests.kernels.test_sample import draw_logits

STEPS, MOST = 3, 20


class Case:
    """Some turns with rows for their drafts, of which some are kept; who asks for how many."""

    def __init__(self, rng: np.random.Generator, block: int, vocabulary: int, kind: str) -> None:
        self.batch, self.live, slots = 7, 6, 9
        self.turn = rng.permutation(slots)[: self.batch].astype(np.int32)
        self.verified = rng.integers(0, block + 1, self.batch)
        self.kept = np.minimum(rng.integers(0, block + 1, self.batch), self.verified).astype(np.int32)
        self.first = (np.cumsum(self.verified + 1) - self.verified - 1).astype(np.int32)
        self.rows = int((self.verified + 1).sum())
        self.live_rows = int((self.verified[: self.live] + 1).sum())
        self.logprobs = rng.integers(0, MOST + 1, slots).astype(np.int32)
        self.logprobs[self.turn[:3]] = [-1, MOST, 0]
        self.row_slot = np.repeat(self.turn, self.verified + 1).astype(np.int32)
        self.row_id = rng.integers(0, vocabulary, self.rows).astype(np.int32)
        self.next = rng.integers(0, vocabulary, self.batch).astype(np.int32)
        self.logits = draw_logits(rng, self.rows, vocabulary, kind)
        self.step, self.most_rows = 3 * STEPS + 1, self.rows + 5
        self.sizes = {"turns": slots, "vocabulary": vocabulary, "result_steps": STEPS, "most_rows": self.most_rows}

    def chosen(self, b: int) -> list[int]:
        """Kept drafts of turn `b`, and the token after them."""
        return [*self.row_id[self.first[b] + 1 : self.first[b] + 1 + self.kept[b]].tolist(), int(self.next[b])]


def rank(gpu: Gpu, case: Case) -> dict[str, np.ndarray]:
    """What rank_logits finds."""
    lists = (STEPS, case.most_rows, MOST)
    out = {"total": ("f64", (case.rows,)), "likeliest": ("i32", lists), "likeliest_logprobs": ("f32", lists)}
    return gpu.run(
        "rank_logits", out, logits=case.logits, row_slot=case.row_slot, logprobs=case.logprobs, **case.sizes,
        step=np.array([case.step]), live=case.live_rows, rows=case.rows,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "masked"])
@pytest.mark.parametrize("vocabulary", [21, 700, 20_001, 129_280])
def test_ratings(gpu: Gpu, rng: np.random.Generator, vocabulary: int, kind: str) -> None:
    """The same tokens in the same order, and logarithms to what float32 holds; those who do not ask are left alone."""
    case = Case(rng, gpu.sizes.block, vocabulary, kind)
    found = rank(gpu, case)
    empty = np.full((STEPS, case.most_rows), 9, np.float32)
    rated = gpu.run(
        "rate_tokens", {"chosen_logprobs": empty}, logits=case.logits, total=found["total"], row_id=case.row_id,
        turn=case.turn, first=case.first, kept=case.kept, next=case.next, logprobs=case.logprobs, **case.sizes,
        step=np.array([case.step]), live=case.live, batch=case.batch,
    )["chosen_logprobs"]  # fmt: skip
    at, untold = case.step % STEPS, empty.copy()
    for b in range(case.live):
        top = int(case.logprobs[case.turn[b]])
        if top < 0:
            continue
        ids, rows = case.chosen(b), slice(case.first[b], case.first[b] + case.verified[b] + 1)
        expected = rate(case.logits[rows], ids, top)
        for i, (logprob, likeliest) in enumerate(expected):
            row = case.first[b] + i
            assert rated[at, row] == pytest.approx(logprob, rel=1e-6, abs=1e-6)
            assert found["likeliest"][at, row, :top].tolist() == [token for token, _ in likeliest]
            values = [value for _, value in likeliest]
            np.testing.assert_allclose(found["likeliest_logprobs"][at, row, :top], values, rtol=1e-6, atol=1e-6)
            untold[at, row] = rated[at, row]
    np.testing.assert_array_equal(rated, untold)


def test_a_row_a_turn(gpu: Gpu, rng: np.random.Generator) -> None:
    """Without drafts a turn's row is the one at its place."""
    case = Case(rng, gpu.sizes.block, 700, "normal")
    case.verified[:], case.kept[:] = 0, 0
    case.first, case.row_slot, case.rows, case.live_rows = np.arange(case.batch), case.turn, case.batch, case.live
    case.logits, case.row_id = case.logits[: case.batch], case.row_id[: case.batch]
    if len(case.logits) < case.batch:
        case.logits = draw_logits(rng, case.batch, 700, "normal")
    total = rank(gpu, case)["total"]
    rated = gpu.run(
        "rate_tokens", {"chosen_logprobs": np.zeros((STEPS, case.most_rows), np.float32)}, logits=case.logits,
        total=total, row_id=case.row_id, turn=case.turn, first=None, kept=None, next=case.next, logprobs=case.logprobs,
        **case.sizes, step=np.array([case.step]), live=case.live, batch=case.batch,
    )["chosen_logprobs"][case.step % STEPS]  # fmt: skip
    for b in range(case.live):
        if case.logprobs[case.turn[b]] >= 0:
            [(logprob, _)] = rate(case.logits[b : b + 1], [int(case.next[b])], 0)
            assert rated[b] == pytest.approx(logprob, rel=1e-6, abs=1e-6)

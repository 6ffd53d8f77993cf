"""sample_rows, weigh_drafts and judge_drafts against the reference's sampler and acceptance rules."""

from collections.abc import Sequence

import numpy as np
import pytest

from dsuf.reference.sampler import choose, distribution, uniform
from dsuf.reference.speculate import Anchor, Speculation, resolve
from dsuf.types import Sampling
from tests.kernels.gpu import Gpu

SAMPLED = ("picked", "peak", "least", "last", "mass")
KINDS = {"picked": "i32", "peak": "f32", "least": "f32", "last": "i32", "mass": "i64"}


class State:
    """How some turns sample."""

    def __init__(self, samplings: list[Sampling]) -> None:
        self.samplings = samplings
        self.fields = {
            "temperature": np.array([s.temperature for s in samplings]),
            "top_p": np.array([s.top_p for s in samplings]),
            "seed": np.array([s.seed for s in samplings], np.uint64).view(np.int64),
        }  # fmt: skip


def draw_samplings(rng: np.random.Generator, count: int) -> State:
    """Greedy, cold, hot, with and without a nucleus."""
    temperatures, nuclei = [0.0, 1.0, 0.6, 1.7, 0.05], [1.0, 0.95, 0.5, 0.1, 1.0, 0.999]
    return State([
        Sampling(
            temperature=temperatures[i % 5], top_p=nuclei[i % 6], seed=int(rng.integers(0, 2**63 - 1)), max_tokens=9
        )
        for i in range(count)
    ])  # fmt: skip


def sample(
    gpu: Gpu, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray, state: State, purpose: int, live: int
) -> dict[str, np.ndarray]:
    """What the kernel finds for all rows."""
    rows, vocabulary = logits.shape
    fields = {
        "logits": logits, "row_slot": slots.astype(np.int32), "row_position": positions.astype(np.int32),
        **state.fields, "turns": len(state.samplings), "vocabulary": vocabulary, "first": 0, "step": 1,
        "purpose": purpose,
    }  # fmt: skip
    return gpu.run("sample_rows", {n: (KINDS[n], (rows,)) for n in SAMPLED}, **fields, live=live, rows=rows)


def draw_logits(rng: np.random.Generator, rows: int, vocabulary: int, kind: str) -> np.ndarray:
    """Logits like a model's, all equal, with few values, or with most tokens ruled out."""
    logits = (rng.standard_normal((rows, vocabulary)) * 4).astype(np.float32)
    if kind == "equal":
        logits[:] = 2.5
    if kind == "ties":
        logits = np.round(logits / 2) * 2
    if kind == "masked":
        logits[rng.random(logits.shape) < 0.9] = -np.inf
        logits[:, 0] = 0
    return logits.astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 7, 512, 4099, 129_280])
@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "masked"])
@pytest.mark.parametrize("purpose", [0, 1])
def test_draws(gpu: Gpu, rng: np.random.Generator, vocabulary: int, kind: str, purpose: int) -> None:
    """The reference's token for every row, whatever else is in the batch; its nucleus, token for token."""
    live = 30 if vocabulary < 5000 else 6
    rows, state = live + 1, draw_samplings(rng, 30)
    logits = draw_logits(rng, rows, vocabulary, kind)
    slots, positions = rng.permutation(30)[np.arange(rows) % 30], rng.integers(0, 1 << 20, rows)
    found = sample(gpu, logits, slots, positions, state, purpose, live)
    for row in range(live):
        sampling = state.samplings[slots[row]]
        expected = choose(logits[row], sampling, int(positions[row]) + 1, ("token", "draft")[purpose])
        if sampling.temperature == 0:
            assert found["picked"][row] == expected
            continue
        kept = logits[row] > found["least"][row]
        kept |= (logits[row] == found["least"][row]) & (np.arange(vocabulary) <= found["last"][row])
        p = distribution(logits[row], sampling)
        differ = kept != (p > 0)
        # Sums that meet top_p exactly can fall on either side of it in float64; then the draw may be one token off.
        edge = int(differ.sum()) == 1 and p[differ].sum() >= 1e-9
        assert abs(int(found["picked"][row]) - expected) <= edge, f"row {row}, {sampling}"
        assert edge or p[differ].sum() < 1e-9
        assert sampling.top_p == 1 or abs(int(kept.sum()) - int((p > 0).sum())) <= 1
        weights = np.exp((logits[row][kept].astype(np.float64) - logits[row].max()) / sampling.temperature)
        assert abs(found["mass"][row] / 2**44 / weights.sum() - 1) < 1e-5
    alone = sample(gpu, logits[3:4], slots[3:4], positions[3:4], state, purpose, 1)
    for name in SAMPLED:
        assert alone[name][0] == found[name][3]
    assert found["picked"][live] == -1


def test_numbers_are_the_reference_s(gpu: Gpu) -> None:
    """Equal logits over 2^16 tokens show the first 16 bits of each draw; edges of seed, position and purpose."""
    seeds = [0, 1, 2**62 + 12345, 2**63 - 1, 2**63 + 1, 2**64 - 1]
    state = State([Sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=1) for seed in seeds])
    slots, positions = np.arange(24) % 6, np.repeat([0, 1, 999_999, 2**31 - 2], 6)
    for purpose, name in enumerate(("token", "draft", "accept", "residual")):
        found = sample(gpu, np.zeros((24, 1 << 16), np.float32), slots, positions, state, purpose, 24)["picked"]
        for row in range(24):
            assert found[row] == int(uniform(seeds[slots[row]], int(positions[row]) + 1, name) * 2**16)


def test_steps_between_rows(gpu: Gpu, rng: np.random.Generator) -> None:
    """One place of every block; the other places stay as they are."""
    batch, block, vocabulary, state = 4, 5, 600, draw_samplings(rng, 4)
    logits, slots = draw_logits(rng, batch * block, vocabulary, "normal"), np.repeat(np.arange(4), block)
    positions = np.tile(np.arange(block), batch) + 50
    whole = sample(gpu, logits, slots, positions, state, 1, batch * block)
    before = {n: np.full(batch * block, 99, whole[n].dtype) for n in SAMPLED}
    found = gpu.run(
        "sample_rows", before, logits=logits, row_slot=slots.astype(np.int32), turns=4, vocabulary=vocabulary, first=2,
        row_position=positions.astype(np.int32), **state.fields, step=block, purpose=1, live=3, rows=4,
    )  # fmt: skip
    at = np.arange(batch) * block + 2
    for name in SAMPLED:
        np.testing.assert_array_equal(found[name][at[:3]], whole[name][at[:3]])
        np.testing.assert_array_equal(np.delete(found[name], at), 99)
    assert found["picked"][at[3]] == -1


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_distribution(gpu: Gpu, rng: np.random.Generator, top_p: float) -> None:
    """Draws at many positions are distributed as they should: chi-square below its 99.99 % point."""
    rows, vocabulary = 8192, 24
    sampling = Sampling(temperature=1.3, top_p=top_p, seed=11, max_tokens=1)
    logits = np.tile((rng.standard_normal(vocabulary) * 1.5).astype(np.float32), (rows, 1))
    found = sample(gpu, logits, np.zeros(rows), np.arange(rows), State([sampling]), 0, rows)["picked"]
    p = distribution(logits[0], sampling)
    count = np.bincount(found, minlength=vocabulary)
    assert not count[p == 0].any()
    expected = p[p > 0] * rows
    assert float(((count[p > 0] - expected) ** 2 / expected).sum()) < 65


def judge(gpu: Gpu, case: "Case", rule: int) -> dict[str, np.ndarray]:
    """Kept and next of every turn."""
    vocabulary, batch = case.logits.shape[1], len(case.turn)
    draft_rows = case.draft_logits.reshape(-1, vocabulary)
    slots = np.repeat(case.turn, gpu.sizes.block)
    draft = sample(gpu, draft_rows, slots, np.zeros(len(slots)), case.state, -1, len(slots))
    rows = sample(gpu, case.logits, case.row_slot, np.zeros(len(case.row_slot)), case.state, -1, len(case.row_slot))
    fields = {n: rows[n] for n in SAMPLED} | {f"draft_{n}": draft[n] for n in SAMPLED[1:]} | {
        "logits": case.logits, "draft_logits": case.draft_logits, "drafts": case.drafts.astype(np.int32),
        "turn": case.turn, "first": case.first, "verified": case.verified, "length": case.length,
        "temperature": case.state.fields["temperature"], "seed": case.state.fields["seed"], "live": case.live,
        "batch": batch, "rows": len(case.logits), "turns": len(case.state.samplings), "vocabulary": vocabulary,
        "rule": rule,
    }  # fmt: skip
    out = {"kept": ("i32", (batch,)), "next": ("i32", (batch,))}
    over = np.zeros((batch, gpu.sizes.block), np.int64)
    over = gpu.run(
        "weigh_drafts", {"over": over}, **fields, kept=np.zeros(batch, np.int32), next=np.zeros(batch, np.int32)
    )
    return gpu.run("judge_drafts", out, **fields, **over)


class Case:
    """A verified step of random turns; drafts are drawn from their own distributions, which are near the target's."""

    def __init__(
        self, rng: np.random.Generator, block: int, vocabulary: int, noise: float, verified: Sequence[int] = (),
        live: int = 8,
    ) -> None:  # fmt: skip
        verified = verified or (block, 0, 1, block, 2, block, block, 3, 1)
        batch, self.live = len(verified), live
        self.state = draw_samplings(rng, 12)
        self.turn = rng.permutation(12)[:batch].astype(np.int32)
        self.length = rng.integers(0, 1000, 12).astype(np.int32)
        self.verified = np.array(verified, np.int32)
        self.first = (np.cumsum(self.verified + 1) - self.verified - 1).astype(np.int32)
        self.row_slot = np.repeat(self.turn, self.verified + 1)
        self.logits = draw_logits(rng, len(self.row_slot), vocabulary, "normal")
        self.draft_logits = draw_logits(rng, batch * block, vocabulary, "normal").reshape(batch, block, vocabulary)
        self.drafts = np.zeros((batch, block), np.int64)
        for b, slot in enumerate(self.turn):
            for r in range(self.verified[b]):
                near = self.logits[self.first[b] + r]
                self.draft_logits[b, r] = near + self.draft_logits[b, r] * np.float32(noise)
            for r in range(block):
                at = int(self.length[slot]) + 1 + r
                self.drafts[b, r] = choose(self.draft_logits[b, r], self.state.samplings[slot], at, "draft")

    def expected(self, b: int, rule: str) -> tuple[int, ...]:
        """What the reference keeps of turn `b` and the token after."""
        rows, count = slice(self.first[b], self.first[b] + self.verified[b] + 1), self.verified[b]
        anchor = Anchor(None, 0, self.state.samplings[self.turn[b]])
        how = Speculation(rule=rule)
        logits, start = self.logits[rows], int(self.length[self.turn[b]])
        return resolve(logits, self.draft_logits[b, :count], self.drafts[b, :count], anchor, start, how)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("vocabulary", [3, 700, 20_000])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
def test_acceptance(gpu: Gpu, rng: np.random.Generator, rule: str, vocabulary: int, noise: float) -> None:
    """The reference's drafts and next token for every turn, over several steps; padding is left alone."""
    kept = []
    for _ in range(4):
        case = Case(rng, gpu.sizes.block, vocabulary, noise)
        found = judge(gpu, case, int(rule == "block"))
        for b in range(case.live):
            expected = case.expected(b, rule)
            own = (*case.drafts[b, : found["kept"][b]].tolist(), int(found["next"][b]))
            assert own == expected, f"turn {b}, {case.state.samplings[case.turn[b]]}"
            kept.append(len(expected) - 1)
        assert (found["kept"][case.live], found["next"][case.live]) == (0, -1)
    assert max(kept) > 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_acceptance_of_one_turn(gpu: Gpu, rng: np.random.Generator, rule: str) -> None:
    """As few rows as there can be, so that a race checker gets through clusters of blocks as well."""
    case = Case(rng, gpu.sizes.block, 40, 0.1, verified=(1,), live=1)
    found = judge(gpu, case, int(rule == "block"))
    assert (*case.drafts[0, : found["kept"][0]].tolist(), int(found["next"][0])) == case.expected(0, rule)


def test_acceptance_keeps_the_distribution(gpu: Gpu, rng: np.random.Generator) -> None:
    """The first token of many steps is distributed as the target says, under both rules."""
    batch, block, vocabulary = 1024, gpu.sizes.block, 12
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=5, max_tokens=1)
    target, own = (rng.standard_normal((2, vocabulary)) * 1.2).astype(np.float32)
    for rule in (0, 1):
        count = np.zeros(vocabulary)
        for turn in range(6):
            case = object.__new__(Case)
            case.state = State([msg_seed(sampling, turn * batch + i) for i in range(batch)])
            case.turn, case.live, case.length = np.arange(batch, dtype=np.int32), batch, np.full(batch, 3, np.int32)
            case.verified, case.first = np.full(batch, 2, np.int32), (np.arange(batch) * 3).astype(np.int32)
            case.row_slot = np.repeat(case.turn, 3)
            case.logits = np.tile(target, (3 * batch, 1))
            case.draft_logits = np.tile(own, (batch, block, 1))
            positions = np.tile(np.arange(block) + 3, batch)
            flat = case.draft_logits.reshape(-1, vocabulary)
            slots = np.repeat(case.turn, block)
            picked = sample(gpu, flat, slots, positions, case.state, 1, len(flat))["picked"]
            case.drafts = picked.reshape(batch, block)
            found = judge(gpu, case, rule)
            first = np.where(found["kept"] > 0, case.drafts[:, 0], found["next"])
            count += np.bincount(first, minlength=vocabulary)
        expected = distribution(target, sampling) * count.sum()
        assert float(((count - expected) ** 2 / expected).sum()) < 42


def msg_seed(sampling: Sampling, seed: int) -> Sampling:
    """`sampling` with another seed."""
    return Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=seed, max_tokens=1)

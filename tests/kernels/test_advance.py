"""advance_turns against what the reference engine hands out and keeps."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.reference.engine import ReferenceEngine
from dsuf.types import Sampling
from tests.kernels.gpu import Gpu

EOS, STEPS = 1, 3


def take(ids: tuple[int, ...], prompt: int, generated: int, max_tokens: int, length: int) -> tuple:
    """What the reference engine gives, and its cache's length and the token that waits afterwards."""
    engine = object.__new__(ReferenceEngine)
    engine.facts = SimpleNamespace(eos_id=EOS)
    cache = SimpleNamespace(length=length)
    cache.truncate = lambda to: setattr(cache, "length", to)
    sampling = Sampling(temperature=0, top_p=1, seed=0, max_tokens=max_tokens)
    turn = SimpleNamespace(
        turn=SimpleNamespace(id="t", sampling=sampling), ids=[0] * prompt, generated=generated, waiting=-1,
        cache=cache, masking=None,
    )  # fmt: skip
    return engine._take(turn, ids, 0, ()), cache.length, turn.waiting, turn.generated


@pytest.mark.parametrize("fed", [0, 1])
def test_advance(gpu: Gpu, rng: np.random.Generator, fed: int) -> None:
    """Ends by token and by length, in the middle and at the edge; records in a ring, the sequence number last."""
    block, slots, batch, live = gpu.sizes.block, 40, 33, 32
    turn = rng.permutation(slots)[:batch].astype(np.int32)
    generated, prompt = rng.integers(1, 20, slots), rng.integers(1, 400, slots)
    if not fed:
        generated[:] = 0
    most = generated + rng.integers(1, 2 * block, slots)
    length = (prompt + generated - 1 if fed else prompt).astype(np.int32)
    kept = rng.integers(0, block + 1, batch) if fed else np.zeros(batch, int)
    verified = np.minimum(kept + rng.integers(0, 3, batch), block)
    drafts, after = rng.integers(0, 12, (batch, block)), rng.integers(0, 12, batch)
    first, ring, rows = np.cumsum(verified + 1) - verified - 1, 300, int((verified + 1).sum())
    state = {"length": length, "anchor": np.full(slots, -5), "generated": generated, "done": np.zeros(slots)}
    numbers = {"verified": verified, "first": first, "kept": kept, "next": after, "turn": turn, "max_tokens": most}
    out = {name: value.astype(np.int32) for name, value in state.items()}
    out |= {
        "results": ("i32", (STEPS, batch + 1, 7 + block)), "sequence": np.array([3, 4, 2]), "step": np.array([4]),
        "feed_place": ("i64", (rows,)),
    }  # fmt: skip
    found = gpu.run(
        "advance_turns", out, **{name: value.astype(np.int32) for name, value in numbers.items()},
        drafts=drafts.astype(np.int32), live=live, batch=batch, turns=slots, rows=rows, ring=ring, fed=fed, eos_id=EOS,
        result_steps=STEPS,
    )  # fmt: skip
    assert found["step"][0] == 5
    np.testing.assert_array_equal(found["sequence"], [3, 5, 2])
    assert found["results"][1, 0, 0] == live
    for b in range(live):
        slot, ids = turn[b], (*drafts[b, : kept[b]].tolist(), int(after[b]))
        start = int(length[slot])
        whole = start + fed + int(kept[b])
        result, end, waiting, count = take(ids, int(prompt[slot]), int(generated[slot]), int(most[slot]), whole)
        record = found["results"][1, b + 1]
        ends = {None: 0, "stop": 1, "length": 2}[result.finish]
        assert record[:6].tolist() == [slot, len(result.ids), ends, verified[b], result.accepted, end]
        assert tuple(record[6 : 6 + len(result.ids)]) == result.ids
        assert [found[n][slot] for n in ("length", "anchor", "generated", "done")] == [end, waiting, count, ends]
        places = start + np.arange(verified[b] + 1)
        fed_place = found["feed_place"][first[b] : first[b] + verified[b] + 1]
        np.testing.assert_array_equal(fed_place, np.where(places < end, slot * ring + places % ring, -1))
    others = np.setdiff1d(np.arange(slots), turn[:live])
    for name, value in state.items():
        np.testing.assert_array_equal(found[name][others], value[others])

"""The comparison of greedy replies, on the toy machine: differences are found where they are, and all is compared."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.campaigns.greedy import KINDS, Difference, Expected, follow, judge, load, page_prompts, record, save
from bench.nano.data.checks import list_kinds
from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.reference.model import Model
from tests.cuda.host import make_host_machine
from tests.cuda.test_protocol import say

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
TOKENS, EOS = 40, CONFIG.eos_token_id


def tell(prompt: list[int], altered: dict[int, int]) -> list[int]:
    """The toy's reply with other tokens at some places, each of which the rest goes on from."""
    ids: list[int] = []
    for place in range(TOKENS):
        ids.append(altered.get(place) or say([*prompt, *ids], 1)[0])
    return ids


def make_expected(altered: list[dict[int, int]]) -> Expected:
    """Replies to as many prompts, two candidates a place: the token, and its successor at a gap of 0.2."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, CONFIG.vocab_size, 5 + 70 * i).tolist() for i in range(len(altered))]
    ids = np.array([tell(prompt, one) for prompt, one in zip(prompts, altered, strict=True)])
    gaps = np.broadcast_to(np.array([0, 0.2], np.float32), (*ids.shape, 2))
    return Expected(prompts, ids, np.stack([ids, ids + 1], axis=2), gaps, np.zeros(ids.shape, np.float32))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    setup = Setup(context_tokens=700, max_turns=3, pages=20, prefill_rows=64)
    return CudaEngine(make_host_machine(monkeypatch, CONFIG, setup), "weights", "exact", captures=False)


async def test_differences_are_found_and_forced(engine: CudaEngine) -> None:
    """At the start, one behind the other, at the end; nothing where the replies are the toy's own."""
    altered = [{0: 7, 20: 9, 21: 11}, {}, {TOKENS - 1: 5}]
    expected = make_expected(altered)
    found = await follow(engine, expected, 0, CONFIG.eos_token_id)
    assert {(one.prompt, one.place) for one in found} == {(i, place) for i, one in enumerate(altered) for place in one}
    assert len(found) == 4 and engine.counters()["turns"] == 0
    for one in found:
        prompt = expected.prompts[one.prompt]
        assert one.own == say([*prompt, *map(int, expected.ids[one.prompt, : one.place])], 1)[0]
    await engine.close()


async def test_an_end_is_a_token(engine: CudaEngine) -> None:
    """Where the reference goes on behind the end token, or says it when the engine does not, all is compared still."""
    expected = make_expected([{6: CONFIG.eos_token_id}, {}])
    found = await follow(engine, expected, 0, CONFIG.eos_token_id)
    assert [(one.prompt, one.place) for one in found] == [(0, 6)]
    await engine.close()


def test_gaps_decide() -> None:
    """A token that is no candidate is as far as the last of them; one far difference in a hundred is allowed."""
    expected = make_expected([{}, {}])
    near, other = int(expected.ids[0, 3]) + 1, int(expected.ids[0, 3]) + 2
    assert expected.gap(0, 3, near) == expected.gap(0, 3, other) == pytest.approx(0.2)
    found = [Difference(0, place % TOKENS, 1, gap) for place, gap in enumerate([0.1] * 99 + [0.7])]
    assert judge(expected, found, 0, EOS)["holds"] and judge(expected, found, 0, EOS)["far"] == 1
    assert not judge(expected, found[1:], 0, EOS)["holds"]
    swayed = np.zeros(expected.ids.shape, np.float32)
    swayed[0, :30], swayed[1, 0] = 0.1, 0.5
    assert judge(expected._replace(swayed=swayed), found[69:], 0, EOS)["usual"]
    assert not judge(expected._replace(swayed=swayed), found[68:], 0, EOS)["usual"]
    assert not judge(expected._replace(swayed=swayed), [found[-1]] * 2, 0, EOS)["usual"]


def test_what_follows_an_end_is_no_reply() -> None:
    """Differences count up to the end token, itself among them; behind it they are told only."""
    expected = make_expected([{6: EOS, 9: EOS}, {}])
    row = judge(expected, [Difference(0, 6, 5, 0.1), Difference(0, 7, 5, 2.0)], 0, EOS)
    assert (row["in_replies"], row["whole_replies"], row["positions"]) == (7 + TOKENS, 1, 2 * TOKENS)
    assert (row["different"], row["different_in_replies"], row["far"], row["far_in_replies"]) == (2, 1, 1, 0)
    assert row["holds"] and not judge(expected, [Difference(0, 6, 5, 0.4)], 0, EOS)["holds"]


def test_what_is_recorded_is_read_again(reference: Model, tmp_path: Path) -> None:
    """The reference's own replies; every token is the best of its candidates, and gaps grow."""
    prompts = [[5, 6, 7], [9] * 20]
    expected = record(reference, prompts, 6)
    save(expected, tmp_path / "greedy.npz")
    again = load(tmp_path / "greedy.npz")
    assert again.prompts == prompts and again.ids.shape == (2, 6)
    assert np.array_equal(again.candidates[:, :, 0], again.ids) and np.array_equal(again.ids, expected.ids)
    assert (np.diff(again.gaps, axis=2) >= 0).all() and not again.gaps[:, :, 0].any()
    assert record(reference, prompts[1:], 6).ids.tolist() == expected.ids[1:].tolist()
    assert np.array_equal(again.swayed, expected.swayed) and load(tmp_path / "greedy.npz", 4).swayed.shape == (2, 4)
    assert judge(again, [], 0, EOS)["holds"]


def test_prompts_are_of_kinds_that_are_there() -> None:
    """Each kind once."""
    assert set(KINDS) <= set(list_kinds()) and len(set(KINDS)) == len(KINDS)


def test_prompts_within_the_page() -> None:
    """Eight, the first at the page's beginning; what follows the last is its end, and together they cover the page."""
    text = (Path(__file__).parents[2] / "bench" / "nano" / "data" / "tetris.html").read_text().removesuffix("\n")
    nano = Path(__file__).parents[2] / "dsuf" / "nano"
    page = Tokenizer.from_file(str(nano / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    prompts, bare = page_prompts(nano, 512), page_prompts(nano, len(page) + 1)
    starts = [len(prompt) - len(asked) for prompt, asked in zip(prompts, bare, strict=True)]
    assert (len(prompts), starts[0], starts[-1]) == (8, 0, len(page) + 1 - 512)
    assert all(prompt[len(asked) :] == page[:start] for prompt, asked, start in zip(prompts, bare, starts, strict=True))
    assert len({tuple(asked) for asked in bare}) == 8 and max(np.diff(starts)) < 512


def test_a_swayed_reference_differs_a_little(reference: Model) -> None:
    """At some places of many, each with the gap of what it chose; the model is left as it was."""
    before = reference.embedding.copy()
    expected = record(reference, [[5, 6, 7]], 40)
    assert 0 < (expected.swayed > 0).sum() < 30
    assert np.array_equal(reference.embedding, before)

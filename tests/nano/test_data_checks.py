"""Held-back checks: none of their words is in training, they fit together as promised, and they are always the same."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.nano.data.checks import NEEDLE_TOKENS, Check, list_dialogues, list_kinds, load_checks
from bench.nano.data.format import list_messages
from bench.nano.data.package import Package, Words

CHEAP = [kind for kind in list_kinds() if kind != "needle.32768"]


@pytest.fixture(scope="module")
def checks(package: Package) -> list[Check]:
    """All but the longest."""
    return load_checks(package, CHEAP)


def test_kinds_are_all_there(checks: list[Check]) -> None:
    """In their order, and each with an answer that ends."""
    assert list(dict.fromkeys(check.kind for check in checks)) == CHEAP
    assert all(check.answer[-1] == 1 and len(check.answer) > 1 for check in checks)
    assert all(check.thinking == bool(len(check.thoughts)) for check in checks)


def test_checks_are_the_same_each_time(package: Package) -> None:
    """And others with another seed."""
    one, again = load_checks(package, ["json"]), load_checks(package, ["json"])
    other = load_checks(package, ["json"], seed=8)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(one, again, strict=True))
    assert not any(np.array_equal(a.prompt, b.prompt) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("tokens", NEEDLE_TOKENS[:3])
def test_ten_needles_share_their_text(package: Package, checks: list[Check], tokens: int) -> None:
    """Ten questions for one text of the promised length, whose facts lie ever deeper."""
    mine = [check for check in checks if check.kind == f"needle.{tokens}"]
    assert len(mine) == 100
    for start in range(0, 100, 10):
        ten = mine[start : start + 10]
        shared = min(int((a.prompt[:100] == ten[0].prompt[:100]).sum()) for a in ten)
        assert shared == 100
        assert all(0.7 * tokens - 200 < len(check.prompt) < tokens + 60 for check in ten)
        text = package.decode(ten[0].prompt)
        sentences = [package.decode(check.answer[:-1]) for check in ten]
        places = [text.index(sentence) for sentence in sentences]
        assert places == sorted(places)


def test_turns_go_on_from_each_other(checks: list[Check]) -> None:
    """Each prompt of a conversation begins with the one before and its answer."""
    mine = [check for check in checks if check.kind == "needle.turns.1024"]
    for start in range(0, len(mine), 4):
        for before, after in zip(mine[start : start + 3], mine[start + 1 : start + 4], strict=True):
            whole = np.concatenate([before.prompt, before.answer])
            assert np.array_equal(after.prompt[: len(whole)], whole)


def test_checks_take_nothing_of_training(package: Package) -> None:
    """Where training has one word and no filler, no check of any kind has either."""
    assert not set(package.words.training) & set(package.words.held)
    bare = replace(package, words=Words(("zygote",), package.words.held), filler=())
    for kind in CHEAP:
        for dialogue, number in list_dialogues(bare, kind)[:10]:
            assert "zygote" not in json.dumps(list_messages(bare, dialogue, number)).lower()

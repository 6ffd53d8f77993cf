"""Masks and log-probabilities on the toy machine: who is asked when, what it changes, and what goes wrong."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.logits import rules
from dsuf.cuda.logits.line import Expected, Line
from dsuf.cuda.logits.masking import Masking
from dsuf.cuda.logits.rules import plan_rules
from dsuf.cuda.machine import Setup
from dsuf.errors import EngineFailed
from dsuf.types import Constraint, Mask, PrefillRange, StepPlan, StepResult, Turn
from tests.cuda.drive import RULE, ThirdMask, count_pages, make_turn
from tests.cuda.host import HostArena, make_host_machine, next_token

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
SETUP = Setup(context_tokens=700, max_turns=4, pages=24, prefill_rows=64)
WORDS = CONFIG.vocab_size


class Opener:
    """Opens masks as told, and keeps them."""

    def __init__(self) -> None:
        self.opened: list[ThirdMask] = []
        self.how: dict[str, float] = {}

    def __call__(self, constraint: Constraint) -> Mask:
        self.opened.append(ThirdMask(WORDS, end=CONFIG.eos_token_id, **self.how))
        return self.opened[-1]


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch, opener: Opener) -> AsyncIterator[CudaEngine]:
    """An engine on the toy; when it is closed, no stream, event or buffer is left."""
    made = CudaEngine(
        make_host_machine(monkeypatch, CONFIG, SETUP), "weights", "exact", captures=False, open_mask=opener
    )
    driver = made.machine.device.driver  # type: ignore[attr-defined]
    yield made
    for turn in list(made._seats):
        made.detach(turn)
    await made.close()
    assert not driver.alive and not driver.memory, "something was left behind"
    assert made._launcher.answers._thread is None or not made._launcher.answers._thread.is_alive()


def say(prompt: list[int], max_tokens: int, *, ruled: bool, spent: int = 0) -> list[int]:
    """What the toy answers, with the rule or without, up to the end."""
    ids, mask = list[int](), ThirdMask(WORDS)
    while len(ids) < max_tokens:
        token = next_token((np.array([*prompt, *ids]) % 251).astype(np.uint8), WORDS)
        if ruled:
            allowed = mask._find([*prompt[len(prompt) - spent :], *ids])
            token = int((token + np.argmax(np.roll(allowed, -token))) % WORDS)
        if token == CONFIG.eos_token_id:
            break
        ids.append(token)
    return ids


async def run(engine: CudaEngine, turns: list[Turn], ahead: int = 1, drafts: int = 0) -> dict[str, list[StepResult]]:
    """All results of turns that run together, with steps launched ahead."""
    for place, turn in enumerate(turns):
        engine.attach(turn, range(4 * place, 4 * place + count_pages(turn)))
    plan = StepPlan(prefill=tuple(PrefillRange(turn.id, 0, len(turn.prompt.ids)) for turn in turns))
    found = {result.turn: [result] for result in await engine.step(plan)}
    plan = StepPlan(decode=tuple(turn.id for turn in turns), drafts=drafts)
    while any(results[-1].finish is None for results in found.values()):
        for results in await asyncio.gather(*[engine.step(plan) for _ in range(1 + ahead)]):
            for result in results:
                found[result.turn].append(result)
    for turn in turns:
        engine.detach(turn.id)
    return found


def ids_of(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.ids]


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("pause_s", [0.0, 0.003])
async def test_masks_in_a_batch(engine: CudaEngine, opener: Opener, ahead: int, pause_s: float) -> None:
    """Turns under a rule keep to it in steps launched ahead; those beside them say what they say alone."""
    opener.how = {"pause_s": pause_s}
    for _ in range(2):
        turns = [make_turn(range(2, 2 + 30 * i), 14, RULE if i % 2 else None) for i in (1, 2, 3, 4)]
        for turn, results in zip(turns, (await run(engine, turns, ahead)).values(), strict=True):
            assert ids_of(results) == say(list(turn.prompt.ids), 14, ruled=turn.constraint is not None)
    assert len(opener.opened) == 4
    assert engine.counters() == {"turns": 0, "steps": 0}


async def test_nobody_is_asked_without_a_rule(engine: CudaEngine) -> None:
    """Neither for plain turns nor for those that want log-probabilities."""
    await run(engine, [make_turn(range(2, 30), 5), make_turn(range(2, 40), 5, logprobs=2)])
    assert engine._launcher.answers._thread is None


async def test_a_rule_that_was_begun_before(engine: CudaEngine) -> None:
    """The prompt's last tokens are under it already."""
    whole = say([5, 6, 7], 12, ruled=True)
    turn = make_turn([5, 6, 7, *whole[:5]], 7, Constraint(grammar="a third", spent=5))
    assert ids_of((await run(engine, [turn]))[turn.id]) == whole[5:]


async def test_a_rule_that_cannot_be_followed(engine: CudaEngine, opener: Opener) -> None:
    """The turn ends, and says why; a turn that ends by its length has no fault."""
    opener.how = {"most": 4}
    turns = [make_turn([5, 6, 7], 12, RULE), make_turn([5, 6, 7], 3, RULE)]
    first, second = (await run(engine, turns)).values()
    assert (len(ids_of(first)), first[-1].finish, first[-1].fault) == (4, "stop", "enough was said")
    assert (len(ids_of(second)), second[-1].finish, second[-1].fault) == (3, "length", None)


async def test_a_mask_that_breaks(engine: CudaEngine, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fails with its reason, and nothing hangs."""
    broken = {"number": 0}

    def find(self: ThirdMask, taken: list[int]) -> np.ndarray:
        broken["number"] += 1
        if broken["number"] > 6:
            raise ValueError("no such place")
        return np.ones(WORDS, bool)

    monkeypatch.setattr(ThirdMask, "_find", find)
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="no such place"):
        await run(engine, [make_turn([5, 6, 7], 40, RULE), make_turn([5, 6], 40)], ahead=3)
    assert time.monotonic() - begun < 5


async def test_a_mask_that_comes_too_late(engine: CudaEngine, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device goes on by itself, and the engine fails."""
    monkeypatch.setattr(rules, "PATIENCE_US", 20_000)
    opener.how = {"pause_s": 0.2}
    with pytest.raises(EngineFailed, match="in time"):
        await run(engine, [make_turn([5, 6, 7], 40, RULE)], ahead=3)


@pytest.mark.parametrize("vocabulary", [512, 577, 700])
def test_rows_of_masks_are_whole_sixteens_of_bytes(vocabulary: int) -> None:
    """As the kernel reads them; what the host gives fills the beginning of its row, and touches no other."""
    arena = HostArena(plan_rules("decode", msgspec.structs.replace(CONFIG, vocab_size=vocabulary), batch=2))
    mask, line = ThirdMask(vocabulary), Line(arena, "decode", first=True)
    masks, questions = arena.host("decode.masks"), arena.host("decode.questions")
    masks[:] = -1
    questions[0, 0], questions[1, :3] = 1, [5, 0, 0]
    line.expect(Expected(0, {5: Masking(mask, make_turn([4], 1, RULE), 0)}))
    arena.host("decode.asked")[0] = 1
    while line.waits:
        line.go_on()
    words = -(-vocabulary // 32)
    assert masks.strides[1] % 16 == 0 and masks.shape[2] - words < 4
    assert np.unpackbits(masks[0, 0].view(np.uint8), count=vocabulary, bitorder="little").tolist() == [*mask._find([])]
    assert (masks[0, 0, words:] == -1).all() and (masks[0, 1:] == -1).all() and (masks[1] == -1).all()
    assert arena.host("decode.masked").ravel().nonzero()[0].tolist() == [0]


def test_an_engine_without_masks_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(make_host_machine(monkeypatch, CONFIG, SETUP), "weights", "exact", captures=False)
    assert not engine.facts.constrains and engine.facts.logprobs
    with pytest.raises(EngineFailed, match="constraints"):
        engine.attach(make_turn([4], 5, RULE), [0])
    assert engine.counters()["turns"] == 0
    asyncio.run(engine.close())


@pytest.mark.parametrize("ahead", [0, 1, 5])
async def test_log_probabilities_reach_their_turn(engine: CudaEngine, ahead: int) -> None:
    """As many as each asks for, of the step and row that they belong to; none for those that do not ask."""
    tops = (None, 20, 0, 3)
    turns = [make_turn(range(2, 9 + i), 9, RULE if i == 2 else None, logprobs=top) for i, top in enumerate(tops)]
    found = await run(engine, turns, ahead)
    for turn, top, results in zip(turns, tops, found.values(), strict=True):
        rated = [one for result in results for one in result.logprobs]
        assert len(rated) == (0 if top is None else len(ids_of(results)))
        for i, (logprob, likeliest) in enumerate(rated):
            length = len(turn.prompt.ids) + max(0, i - 1)  # before the step, whose first follows the prompt itself
            assert logprob == -length / 8
            assert likeliest == tuple((length + j, -j) for j in range(top))

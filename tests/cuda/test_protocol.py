"""The engine's own logic on a toy machine: order, ends, slots, states and pages, failures, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsuf.checkpoint.config import load_config
from dsuf.cuda import engine as engine_module
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.errors import CheckpointError, ContextTooLong, EngineFailed, QueueFull
from dsuf.types import Engine, PrefillRange, SessionState, StepPlan, Turn
from tests.cuda.drive import count_pages, make_turn
from tests.cuda.host import make_host_machine, next_token, read_tokens

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
SETUP = Setup(context_tokens=700, max_turns=3, pages=24, prefill_rows=64)


@pytest.fixture(params=["exact", "replay"])
async def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CudaEngine]:
    """An engine on the toy; when it is closed, no stream, event or buffer is left."""
    machine = make_host_machine(monkeypatch, CONFIG, SETUP)
    made = CudaEngine(machine, "weights", request.param, captures=False)
    driver = machine.device.driver  # type: ignore[attr-defined]
    yield made
    for turn in list(made._seats):
        made.detach(turn)
    await made.close()
    assert not driver.alive, "streams or events were left behind"
    assert not driver.memory, "buffers were left behind"


def say(prompt: list[int], max_tokens: int, stored: dict[int, int] | None = None) -> list[int]:
    """What the toy answers; `stored` gives bytes at positions where its pages hold others than the prompt's."""
    ids: list[int] = []
    while len(ids) < max_tokens:
        held = np.array([*prompt, *ids]) % 251
        for position, byte in (stored or {}).items():
            held[position] = byte
        ids.append(next_token(held.astype(np.uint8), CONFIG.vocab_size))
    return ids


async def finish(engine: CudaEngine, turn: Turn, start: int = 0, chunk: int = 50, ahead: int = 1) -> list[int]:
    """Prefill from `start` on in chunks that are all launched at once, then decode with steps launched ahead."""
    length, ids = len(turn.prompt.ids), []
    parts = [PrefillRange(turn.id, at, min(at + chunk, length)) for at in range(start, length, chunk)]
    for results in await asyncio.gather(*[engine.step(StepPlan(prefill=(part,))) for part in parts]):
        ids += results[0].ids
        ended = results[0].finish
    while not ended:
        plan = StepPlan(decode=(turn.id,))
        for results in await asyncio.gather(*[engine.step(plan) for _ in range(1 + ahead)]):
            for result in results:
                assert ended is None
                ids += result.ids
                ended = result.finish
    return ids


def test_is_an_engine(engine: CudaEngine) -> None:
    """It has all that the protocol asks for."""
    protocol: Engine = engine
    assert protocol.layout.pages == SETUP.pages
    assert protocol.layout.page_bytes == engine.machine.sizes.page_bytes


@pytest.mark.parametrize("ahead", [0, 1, 5])
async def test_turns_in_slots(engine: CudaEngine, ahead: int) -> None:
    """More turns than slots, one after the other and at once, each says what it says alone."""
    turns = [make_turn(range(2, 2 + size), 12) for size in (1, 49, 50, 51, 130, 200)]
    for group in (turns[:3], turns[3:]):
        for place, turn in enumerate(group):
            engine.attach(turn, range(place * 4, place * 4 + count_pages(turn)))
        replies = await asyncio.gather(*[finish(engine, turn, ahead=ahead) for turn in group])
        for turn, reply in zip(group, replies, strict=True):
            assert reply == say(list(turn.prompt.ids), 12)
            engine.detach(turn.id)
            engine.detach(turn.id)
    assert engine.counters() == {"turns": 0, "steps": 0}


async def test_more_pages_than_a_turn_can_fill(engine: CudaEngine) -> None:
    """Those that are too many are not used."""
    turn = make_turn(range(2, 60), 6)
    engine.attach(turn, range(SETUP.pages))
    assert await finish(engine, turn) == say(list(range(2, 60)), 6)


async def test_one_batch(engine: CudaEngine) -> None:
    """Turns that decode together end each at its own time; a plan may go on naming those that have ended."""
    turns = [make_turn(range(2, 20), tokens) for tokens in (1, 5, 9)]
    for place, turn in enumerate(turns):
        engine.attach(turn, [place])
    plan = StepPlan(prefill=tuple(PrefillRange(turn.id, 0, 18) for turn in turns))
    ids = {result.turn: list(result.ids) for result in await engine.step(plan)}
    everybody = StepPlan(decode=tuple(turn.id for turn in turns), drafts=5)
    for results in await asyncio.gather(*[engine.step(everybody) for _ in range(12)]):
        for result in results:
            ids[result.turn] += result.ids
    assert ids == {turn.id: say(list(range(2, 20)), turn.sampling.max_tokens) for turn in turns}
    assert await engine.step(everybody) == []


async def test_a_state_moves(engine: CudaEngine) -> None:
    """State and pages go out and come back elsewhere: the turn goes on, and its pages hold what they held."""
    for length in (1, 16, 127, 128, 300):
        turn = make_turn(range(2, 2 + length), 40)
        engine.attach(turn, range(count_pages(turn)))
        parts = StepPlan(prefill=(PrefillRange(turn.id, 0, length),))
        ids = [*(await engine.step(parts))[0].ids]
        for _ in range(9):
            ids += (await engine.step(StepPlan(decode=(turn.id,))))[0].ids
        state = await engine.read_state(turn.id)
        assert state is not None and state.length == length + 9
        history = [*turn.prompt.ids, *ids]
        assert np.frombuffer(state.ids, "<i8").tolist() == history[: state.length]
        kept = [bytearray(engine.layout.page_bytes) for _ in range(count_pages(turn))]
        await engine.read_pages(range(len(kept)), [memoryview(page) for page in kept])
        engine.detach(turn.id)
        again = make_turn(history, 20)
        places = [20 - 2 * page for page in range(count_pages(again))]
        engine.attach(again, places)
        writing = engine.write_pages(places[: len(kept)], [memoryview(page) for page in kept[: len(places)]])
        resuming = engine.resume(again.id, state.length, state)
        assert (await writing, await resuming) == (None, state.length)
        assert await finish(engine, again, state.length) == say(history, 20)
        tokens = np.concatenate([read_tokens(engine.machine, page) for page in places])
        np.testing.assert_array_equal(tokens[: len(history)], np.array(history) % 251)
        engine.detach(again.id)


async def test_states_that_do_not_fit(engine: CudaEngine) -> None:
    """Another model's, another prompt's, one cut too far: refused, and the turn is as it was."""
    turn = make_turn(range(2, 60), 10)
    engine.attach(turn, [0])
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 0, 58),)))
    state = await engine.read_state(turn.id)
    assert isinstance(state, SessionState)
    again = make_turn(range(2, 100), 10)
    engine.attach(again, [1])
    read_tokens(engine.machine, 1)[:] = read_tokens(engine.machine, 0)
    wrong = [
        (58, msgspec.structs.replace(state, fingerprint="other")),
        (58, msgspec.structs.replace(state, payload=state.payload[:-1])),
        (58, msgspec.structs.replace(state, ids=state.ids[8:] + state.ids[:8])),
        (58, msgspec.structs.replace(state, ids=state.ids[8:])),
        (58 - 17, state),
        (59, state),
        (98, None),
    ]
    for length, other in wrong:
        with pytest.raises(CheckpointError):
            await engine.resume(again.id, length, other)
    if engine.prefill == "exact":
        with pytest.raises(CheckpointError, match="state"):
            await engine.resume(again.id, 64, None)
    assert await engine.resume(again.id, 58, state) == 58
    with pytest.raises(EngineFailed, match="positions of its own"):
        await engine.resume(again.id, 58, state)
    assert await finish(engine, again, 58) == say(list(range(2, 100)), 10)


async def test_the_end_of_a_prompt_may_change(engine: CudaEngine) -> None:
    """As where a client drops what a turn thought: the next goes on before that, but never further back than its slot
    has rows, however often prompts change."""
    ids, near = list(range(2, 102)), 1 if engine.prefill == "replay" else 16
    turn = make_turn(ids, 4)
    engine.attach(turn, [0])
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 0, 100),)))
    state = await engine.read_state(turn.id)
    assert state is not None and max(state.spare, state.near) == near
    assert (state.spare, state.near) == ((0, 1) if engine.prefill == "replay" else (16, 0))
    back = 100 - near
    other = make_turn([*ids[:back], 7, 8, 9], 5)
    engine.attach(other, [1])
    read_tokens(engine.machine, 1)[:] = read_tokens(engine.machine, 0)
    with pytest.raises(CheckpointError, match="cut"):
        await engine.resume(other.id, back - 1, state)
    assert await engine.resume(other.id, back, state) == back
    await engine.step(StepPlan(prefill=(PrefillRange(other.id, back, back + 3),)))
    again = await engine.read_state(other.id)
    assert again is not None and again.length == back + 3
    further = again.length - max(again.spare, again.near)
    assert further >= 84
    last = [*other.prompt.ids[:further], 11]
    third = make_turn(last, 5)
    engine.attach(third, [2])
    read_tokens(engine.machine, 2)[:] = read_tokens(engine.machine, 1)
    with pytest.raises(CheckpointError, match="cut"):
        await engine.resume(third.id, further - 1, again)
    assert await engine.resume(third.id, further, again) == further
    assert await finish(engine, third, further) == say(last, 5)


async def test_pages_alone(engine: CudaEngine) -> None:
    """Without a state a replay goes on a window before the kept pages, and does not write them."""
    if engine.prefill == "exact":
        return
    turn = make_turn(range(2, 302), 5)
    pages = list(range(count_pages(turn)))
    engine.attach(turn, pages)
    for page in pages[:2]:
        read_tokens(engine.machine, page)[:] = 77
    assert await engine.resume(turn.id, 256, None) == 256 - CONFIG.window_size
    expected = say(list(range(2, 302)), 5, dict.fromkeys(range(256), 77))
    assert await finish(engine, turn, 256 - CONFIG.window_size) == expected
    assert (read_tokens(engine.machine, pages[0]) == 77).all()
    assert (read_tokens(engine.machine, pages[1]) == 77).all()
    np.testing.assert_array_equal(read_tokens(engine.machine, pages[2])[:44], np.arange(258, 302) % 251)


async def test_no_state_in_a_replay(engine: CudaEngine) -> None:
    """In the midst of a replayed prompt there is none; an exact one has one behind every chunk."""
    turn = make_turn(range(2, 102), 5)
    engine.attach(turn, [0])
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 0, 50),)))
    state = await engine.read_state(turn.id)
    assert (state is None) == (engine.prefill == "replay")
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 50, 100),)))
    state = await engine.read_state(turn.id)
    assert state is not None and state.length == 100
    assert state.spare == (0 if engine.prefill == "replay" else 16)


async def test_refusals(engine: CudaEngine) -> None:
    """Wrong plans and wrong turns are refused with what is wrong; what was attached goes on."""
    turn = make_turn(range(2, 40), 5)
    engine.attach(turn, [0])
    with pytest.raises(ContextTooLong, match="701"):
        engine.attach(make_turn([5] * 700, 1), range(6))
    with pytest.raises(ContextTooLong, match="pages"):
        engine.attach(make_turn([5] * 120, 8), [1])
    for place in (1, 2):
        engine.attach(make_turn([5], 1), [place])
    with pytest.raises(QueueFull):
        engine.attach(make_turn([5], 1), [3])
    for plan in (
        StepPlan(prefill=(PrefillRange(turn.id, 1, 38),)), StepPlan(prefill=(PrefillRange(turn.id, 0, 39),)),
        StepPlan(prefill=(PrefillRange("nobody", 0, 1),)), StepPlan(decode=("nobody",)), StepPlan(drafts=6),
    ):  # fmt: skip
        with pytest.raises(EngineFailed):
            await engine.step(plan)
    with pytest.raises(ValueError, match="bytes"):
        await engine.read_pages([0], [memoryview(bytearray(3))])
    assert await finish(engine, turn) == say(list(range(2, 40)), 5)


async def test_nobody_waits(engine: CudaEngine) -> None:
    """A step whose waiter is cancelled is carried out: the turn is where it should be, and nothing is lost."""
    turn = make_turn(range(2, 40), 12)
    engine.attach(turn, [0])
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 0, 38),)))
    waiting = asyncio.ensure_future(engine.step(StepPlan(decode=(turn.id,))))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    results = await engine.step(StepPlan(decode=(turn.id,)))
    assert list(results[0].ids) == say(list(range(2, 40)), 12)[2:3]
    assert engine.counters() == {"turns": 1, "steps": 0}


async def test_a_step_that_never_ends(engine: CudaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at its deadline, and says so."""
    turn = make_turn(range(2, 40), 12)
    engine.attach(turn, [0])
    await engine.step(StepPlan(prefill=(PrefillRange(turn.id, 0, 38),)))
    monkeypatch.setattr(engine_module, "STEP_DEADLINE_S", 0.05)
    engine.machine.decoder.kernels.runs = False  # type: ignore[attr-defined]
    with pytest.raises(EngineFailed, match="did not finish"):
        await engine.step(StepPlan(decode=(turn.id,)))

"""The CUDA engine against the reference, and against itself in every way of dividing the same work."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from dsuf.cuda.arena import Array, read_array, write_array
from dsuf.cuda.ends import enter_streams as enter_on_device
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.graphs import Graphs
from dsuf.cuda.launches import Pass
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.step import entries_of
from dsuf.cuda.streams import Stream
from dsuf.errors import CommandError, ContextTooLong, QueueFull
from dsuf.reference.batch import ForcedChoices, Segment
from dsuf.reference.model import Model, enter_streams
from dsuf.types import PrefillRange, Sampling, StepPlan
from tests.cuda.drive import count_pages, decode, generate, make_turn, prefill, read_caches, share

F32 = NDArray[np.float32]
USUAL_ERRORS = {"attn_in": 0.0, "attn_out": 1.5e-2, "ffn_in": 8e-3, "h_out": 8e-3, "pre_mix_out": 8e-3}
"""Median errors of rows that rounding elsewhere may make; few rows are twice as far."""


@pytest.fixture(scope="module")
def exact(machine: Machine) -> Iterator[CudaEngine]:
    """An engine that prefills all layers of all positions."""
    with share(machine, "exact") as engine:
        yield engine


@pytest.fixture(scope="module")
def replay(machine: Machine) -> Iterator[CudaEngine]:
    """An engine whose decoder sees the last window of a prompt."""
    with share(machine, "replay") as engine:
        yield engine


@pytest.fixture
def prompts(machine: Machine) -> list[NDArray[np.int64]]:
    """Prompts whose lengths lie around groups, windows and pages."""
    rng = np.random.default_rng(4)
    return [rng.integers(3, machine.config.vocab_size, size) for size in (1, 2, 15, 17, 64, 90, 127, 129)]


class Watcher:
    """Keeps what a pass shows, as values."""

    def __init__(self) -> None:
        self.seen: dict[str, NDArray[np.generic]] = {}

    def see(self, name: str, array: Array) -> None:
        """Copy the array out."""
        found = read_array(array)
        self.seen[name] = found.view(ml_dtypes.bfloat16).astype(np.float32) if array.kind == "bf16" else found

    def force(self, name: str) -> None:
        """Nothing."""


def put_streams(machine: Machine, streams: F32, pre: F32) -> None:
    """Let the next layer begin with these."""
    for name, values in (("streams", streams.astype(ml_dtypes.bfloat16).view(np.uint16)), ("ffn.pre", pre)):
        array = machine.prefiller.work[name]
        write_array(array.rows(0, len(values)), values)


def row_errors(own: NDArray[np.generic], expected: F32) -> NDArray[np.float64]:
    """Relative error of each row."""
    own, rows = own[: len(expected)].reshape(len(expected), -1).astype(np.float64), expected.reshape(len(expected), -1)
    return np.linalg.norm(own - rows, axis=1) / np.maximum(np.linalg.norm(rows, axis=1), 1e-30)


def test_layers_with_the_reference_s_input(machine: Machine, reference: Model) -> None:
    """Every layer, given what the reference's was given: outputs within BF16 rounding, nearly all choices equal."""
    config, rows = machine.config, 96
    ids = np.random.default_rng(8).integers(3, config.vocab_size, rows)
    cache = reference.new_cache()
    cache.put_ids(0, ids)
    batch, watcher = reference.batch([Segment(cache, 0, rows)]), Watcher()
    machine.turns.begin(0, Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=1), range(8), 0)
    prefiller = machine.prefiller
    prefiller.put_rows(0, 0, ids, 0)
    todo = Pass(
        prefiller.kernels, 0, prefiller.work, machine.turns, 128, entries_of(1024), fresh=True, observer=watcher
    )
    machine.model.place(todo)
    enter_on_device(todo, machine.arena)
    streams, pre = enter_streams(reference.embedding[ids], config.hc_mult)
    assert not row_errors(
        read_array(prefiller.work["streams"]).view(ml_dtypes.bfloat16).astype(np.float32), streams
    ).any()
    for layer in range(config.n_layers):
        put_streams(machine, streams, pre)
        machine.model.run_layer(todo, layer)
        if layer in reference.engrams:
            streams = reference.engrams[layer].forward(streams, reference._table_rows(layer, batch))
        theirs = ForcedChoices({})
        streams, pre = reference.layers[layer].forward(streams, pre, batch, theirs)
        picks = watcher.seen[f"layers.{layer}.ffn.router_indices"].ravel()[: rows * config.n_activated_experts]
        routed = picks.reshape(rows, -1) == theirs.seen[f"layers.{layer}.ffn.router_indices"]
        assert routed.all(axis=1).mean() >= 0.97
        for name, usual in USUAL_ERRORS.items():
            found = row_errors(watcher.seen[f"layers.{layer}.{name}"], theirs.seen[f"layers.{layer}.{name}"])
            assert np.median(found) <= usual and (found <= 2 * usual).mean() >= 0.97, (layer, name, found.max())


def test_first_token(exact: CudaEngine, machine: Machine, reference: Model, prompts: list[NDArray[np.int64]]) -> None:
    """Logits behind a prompt are the reference's within what roundings grow to, in both ways of prefilling."""
    engines = {"exact": exact, "replay": CudaEngine(machine, "weights", "replay")}
    for mode, engine in engines.items():
        errors = []
        for ids in prompts:
            cache = reference.new_cache()
            output = (
                reference.forward([(cache, ids)]) if mode == "exact"
                else reference.prefill_replay(cache, ids, last=True)
            )  # fmt: skip
            generate(engine, [ids], 1)
            own = read_array(machine.prefiller.work["logits"])
            errors.append(float(row_errors(own, reference.logits(output, slice(-1, None)))[0]))
        # A choice of an expert that falls the other way moves a random model's logits by that much.
        assert np.median(errors) <= 0.15 and max(errors) <= 0.6, (mode, errors)


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_chunks(mode: str, exact: CudaEngine, replay: CudaEngine, machine: Machine) -> None:
    """Tokens and cache bytes are the same for any division of the prompt, launched ahead or not, and without graphs."""
    engine = exact if mode == "exact" else replay
    plain = CudaEngine(machine, "weights", engine.prefill, captures=False)
    ids = np.random.default_rng(1).integers(3, machine.config.vocab_size, 150)
    whole = generate(engine, [ids], 40)
    left = read_caches(machine, 150 + 30)
    ways = ((engine, 1, 3), (engine, 7, 0), (engine, 33, 1), (engine, 33, 9), (engine, 128, 0), (plain, None, 0))
    for other, chunk, ahead in ways:
        assert generate(other, [ids], 40, chunk=chunk, ahead=ahead) == whole
        assert read_caches(machine, 150 + 30) == left


def test_decode_is_prefill(exact: CudaEngine, machine: Machine, prompts: list[NDArray[np.int64]]) -> None:
    """A reply that is fed as a prompt leaves the same bytes and goes on with the same tokens."""
    for ids in prompts[::3]:
        (reply,) = generate(exact, [ids], 60)
        left = read_caches(machine, len(ids) + 50)
        (rest,) = generate(exact, [np.append(ids, reply[:50])], len(reply) - 50)
        assert rest == reply[50:]
        assert read_caches(machine, len(ids) + 50) == left


def test_drafts_batches_and_steps_ahead(exact: CudaEngine, prompts: list[NDArray[np.int64]]) -> None:
    """Greedy tokens do not depend on drafts, on the turns beside, or on how many steps are under way."""
    alone = [generate(exact, [ids], 48)[0] for ids in prompts]
    for drafts in (0, 1, 2, 5):
        for ahead in (0, 1, 4):
            assert generate(exact, prompts, 48, drafts=drafts, ahead=ahead) == alone, (drafts, ahead)


def test_a_stream_is_asked_while_its_graph_is_captured(machine: Machine) -> None:
    """Of the driver itself, as the event loop asks while the launching thread captures: it is no failure."""

    def ask() -> None:
        machine.device.use()
        stream.check()

    with Stream(-1) as stream, ThreadPoolExecutor(1) as pool:
        graphs = Graphs()

        def look(_: int) -> None:
            pool.submit(ask).result()

        for shape in ("a", "b", "a"):
            graphs.run(shape, look, stream.handle)
        stream.synchronize()
        graphs.close()


def test_sampled(exact: CudaEngine, prompts: list[NDArray[np.int64]]) -> None:
    """A seed gives the same tokens, whatever else is in the batch; another seed gives others."""
    for drafts in (0, 5):
        settings = {"temperature": 0.9, "top_p": 0.95, "drafts": drafts}
        alone = [generate(exact, [ids], 30, seed=5, **settings)[0] for ids in prompts[:4]]
        assert generate(exact, prompts[:4], 30, seed=5, **settings) == alone
        assert generate(exact, prompts[:4], 30, seed=6, **settings) != alone


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 127, 128, 300])
def test_states(mode: str, length: int, exact: CudaEngine, replay: CudaEngine, machine: Machine) -> None:
    """A turn goes on in another slot from its state and copied pages, also with its last positions left off."""
    engine, config = exact if mode == "exact" else replay, machine.config
    ids = np.random.default_rng(length).integers(3, config.vocab_size, length)
    turn = make_turn(ids, 40)
    pages = range(count_pages(turn))
    engine.attach(turn, pages)
    reply = list(prefill(engine, turn).ids)
    for results in engine.run(*[StepPlan(decode=(turn.id,), drafts=3)] * 4):
        reply += results[0].ids
    state = call(engine, "read_state", turn.id)
    kept = [bytearray(machine.sizes.page_bytes) for _ in pages]
    call(engine, "read_pages", pages, [memoryview(page) for page in kept])
    reply += decode(engine, [turn], drafts=3)[turn.id]
    history = [*ids.tolist(), *reply]
    engine.attach(make_turn([5], 2), [60])  # the other slot is taken, so the state moves
    for cut in (0, 1, min(state.spare, 9)):
        start, end = state.length - cut, state.length + 3
        again = make_turn(history[:end], len(history) - end)
        moved = [70 + 2 * page for page in range(count_pages(again))]
        engine.attach(again, moved)
        count = min(len(moved), len(kept))
        call(engine, "write_pages", moved[:count], [memoryview(page) for page in kept[:count]])
        assert call(engine, "resume", again.id, start, state) == start
        found = prefill(engine, again, start, 2)
        assert [*found.ids, *decode(engine, [again], drafts=2)[again.id]] == history[end:], cut
        engine.detach(again.id)
    for name in list(engine._seats):
        engine.detach(name)


def call(engine: CudaEngine, name: str, *arguments: object, **named: object) -> object:
    """What the engine's coroutine `name` gives."""

    async def run() -> object:
        return await getattr(engine, name)(*arguments, **named)

    return asyncio.run(run())


def test_pages_without_a_state(replay: CudaEngine, machine: Machine) -> None:
    """A replay goes on from whole pages alone: they stay as they are, and chunks do not matter."""
    ids = np.random.default_rng(2).integers(3, machine.config.vocab_size, 300)
    turn = make_turn(ids, 8)
    replay.attach(turn, range(count_pages(turn)))
    prefill(replay, turn)
    replay.detach(turn.id)
    left, logits = read_caches(machine, 256), []
    for chunk in (None, 10, 50):
        again = make_turn(ids, 8)
        replay.attach(again, range(count_pages(again)))
        start = call(replay, "resume", again.id, 256, None)
        assert start == 256 - machine.config.window_size
        prefill(replay, again, start, chunk)
        logits.append(read_array(machine.prefiller.work["logits"]))
        assert read_caches(machine, 256) == left
        replay.detach(again.id)
    assert all((other == logits[0]).all() for other in logits)


def test_a_prompt_that_ends_otherwise(replay: CudaEngine, machine: Machine, reference: Model) -> None:
    """It goes on from the state of the one before, its last position left off, in any chunks, as the reference does."""
    rng, errors = np.random.default_rng(6), []
    for length in (70, 129, 200):
        ids = rng.integers(3, machine.config.vocab_size, length)
        following = np.concatenate([ids[:-1], rng.integers(3, machine.config.vocab_size, 40)])
        turn = make_turn(ids, 8)
        replay.attach(turn, range(count_pages(turn)))
        prefill(replay, turn)
        state = call(replay, "read_state", turn.id)
        assert (state.spare, state.near, state.repeats) == (0, 1, True)
        kept = [bytearray(machine.sizes.page_bytes) for _ in range(count_pages(turn))]
        call(replay, "read_pages", range(len(kept)), [memoryview(page) for page in kept])
        replay.detach(turn.id)
        logits = []
        for chunk in (None, 7):
            again = make_turn(following, 8)
            replay.attach(again, range(50, 50 + count_pages(again)))
            call(replay, "write_pages", range(50, 50 + len(kept)), [memoryview(page) for page in kept])
            assert call(replay, "resume", again.id, length - 1, state) == length - 1
            prefill(replay, again, length - 1, chunk)
            logits.append(read_array(machine.prefiller.work["logits"])[:1])
            replay.detach(again.id)
        np.testing.assert_array_equal(*logits)
        cache = reference.new_cache()
        reference.prefill_replay(cache, ids, last=True)
        cache.truncate(length - 1)
        output = reference.prefill_replay(cache, following[length - 1 :], last=True)
        assert output is not None
        errors.append(float(row_errors(logits[0], reference.logits(output, slice(-1, None)))[0]))
    print(f"\ndistances from the reference {np.round(errors, 3)}")
    assert np.median(errors) < 0.5  # of unrelated logits it is 1.4


def test_random_arrivals(exact: CudaEngine, machine: Machine) -> None:
    """Turns that come, leave and share steps at random give the tokens that they give alone; nothing is held after."""
    rng, vocabulary = np.random.default_rng(3), machine.config.vocab_size
    prompts = [rng.integers(3, vocabulary, int(rng.integers(1, 200))) for _ in range(16)]
    alone = {i: generate(exact, [ids], 20)[0] for i, ids in enumerate(prompts)}
    pool, waiting, places, turns = list(range(100)), list(range(16)), {}, {}
    replies: dict[str, list[int]] = {}
    while waiting or turns:
        while waiting and len(turns) < 8:
            number = waiting.pop()
            turn = make_turn(prompts[number], 20)
            places[turn.id] = [pool.pop() for _ in range(count_pages(turn))]
            exact.attach(turn, places[turn.id])
            turns[turn.id], replies[turn.id] = (number, turn), []
        fed = {name: exact._seats[name].fed for name in turns}
        unfinished = [name for name, (_, turn) in turns.items() if fed[name] < len(turn.prompt.ids)]
        parts = tuple(
            PrefillRange(name, fed[name], min(fed[name] + 50, len(turns[name][1].prompt.ids)))
            for name in unfinished[:2]
        )
        going = tuple(name for name in turns if name not in unfinished)
        (results,) = exact.run(StepPlan(prefill=parts, decode=going, drafts=int(rng.choice([0, 5]))))
        for result in results:
            replies[result.turn] += result.ids
            if result.finish:
                number, _ = turns.pop(result.turn)
                assert replies[result.turn] == alone[number]
                exact.detach(result.turn)
                pool += places.pop(result.turn)
        if going and going[0] in turns and rng.random() < 0.1:
            turns.pop(going[0])
            exact.detach(going[0])
            pool += places.pop(going[0])
    assert exact.counters() == {"turns": 0, "steps": 0} and len(pool) == 100


def test_engram_in_host_memory(exact: CudaEngine, checkpoint: Path, prompts: list[NDArray[np.int64]]) -> None:
    """Tables in pinned host memory give the tokens of tables on the card."""
    setup = Setup(context_tokens=512, max_turns=2, pages=20, budget_bytes=1 << 30, engram_on_host=True)
    engine = CudaEngine.load(checkpoint, setup, "exact")
    assert generate(engine, prompts[5:6], 40, drafts=5) == generate(exact, prompts[5:6], 40)
    asyncio.run(engine.close())


def test_refusals(exact: CudaEngine, checkpoint: Path, machine: Machine) -> None:
    """Too little memory, too long a turn, too many turns: each says so with its numbers."""
    with pytest.raises(CommandError, match=r"device memory: .* are needed"):
        Machine.load(checkpoint, Setup(context_tokens=1024, max_turns=8, budget_bytes=10 << 20))
    with pytest.raises(ContextTooLong, match="2050"):
        exact.attach(make_turn([4] * 2000, 50), range(20))
    with pytest.raises(ContextTooLong, match="pages"):
        exact.attach(make_turn([4] * 200, 50), range(1))
    turns = [make_turn([4], 1) for _ in range(machine.setup.max_turns + 1)]
    for turn in turns[:-1]:
        exact.attach(turn, [0])
    with pytest.raises(QueueFull):
        exact.attach(turns[-1], [0])
    for turn in turns:
        exact.detach(turn.id)

"""What must be equal: any chunking, any batch, a cache taken along. To the bit, in logits and in the global cache."""

import numpy as np
import pytest

from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.cache import SequenceCache
from dsuf.reference.model import Model

ALL = slice(None)


def exact(model: Model, ids: I64, chunks: list[int]) -> tuple[F32, bytes]:
    """Logits at every position and the global cache after a prefill in chunks of the given sizes, repeated."""
    cache, rows, start = model.new_cache(), [], 0
    while start < len(ids):
        size = chunks[len(rows) % len(chunks)]
        rows.append(model.logits(model.forward([(cache, ids[start : start + size])]), ALL))
        start += size
    return np.concatenate(rows), cache.global_bytes()


def replay(model: Model, ids: I64, chunks: list[int]) -> tuple[F32, SequenceCache]:
    """Last logits and cache after a replayed prefill in chunks."""
    cache, count = model.new_cache(), 0
    while cache.length < len(ids):
        part = ids[cache.length : cache.length + chunks[count % len(chunks)]]
        output = model.prefill_replay(cache, part, last=cache.length + len(part) == len(ids))
        count += 1
    assert output is not None
    return model.logits(output, slice(-1, None))[0], cache


def decode(model: Model, cache: SequenceCache, ids: I64) -> F32:
    """Logits after each of `ids`, fed one at a time."""
    return np.concatenate([model.logits(model.forward([(cache, ids[i : i + 1])]), ALL) for i in range(len(ids))])


@pytest.fixture(scope="module")
def whole(model: Model, ids: I64) -> tuple[F32, bytes]:
    return exact(model, ids, [len(ids)])


@pytest.mark.parametrize(
    "chunks", [[1], [7], [64], [128], np.random.default_rng(5).integers(1, 40, 30).tolist()], ids=lambda c: str(c[:4])
)
def test_chunks_equal_the_whole(model: Model, ids: I64, whole: tuple[F32, bytes], chunks: list[int]) -> None:
    logits, cache = exact(model, ids, chunks)
    assert np.array_equal(logits, whole[0])
    assert cache == whole[1]


def test_global_cache_has_the_stated_size(model: Model, ids: I64, whole: tuple[F32, bytes]) -> None:
    c = model.config
    entry = c.head_dim // 2 + c.head_dim // 16 + c.index_head_dim // 2 + c.index_head_dim // 32
    assert len(whole[1]) == entry * sum(len(ids) // c.ratio(source) for source in c.kv_source_layers)


def test_four_sequences_together_equal_each_alone(model: Model, ids: I64) -> None:
    lengths, following = (140, 57, 98, 9), ids[:6]
    together = [model.new_cache() for _ in lengths]
    output = model.forward([(cache, ids[:n]) for cache, n in zip(together, lengths, strict=True)])
    steps = [model.logits(output, np.cumsum(lengths) - 1)]
    steps += [model.logits(model.forward([(cache, following[i : i + 1]) for cache in together]), ALL) for i in range(6)]
    for place, n in enumerate(lengths):
        alone = model.new_cache()
        first = model.logits(model.forward([(alone, ids[:n])]), slice(-1, None))
        expected = np.concatenate([first, decode(model, alone, following)])
        assert np.array_equal(np.stack([step[place] for step in steps]), expected)
        assert together[place].global_bytes() == alone.global_bytes()


@pytest.mark.parametrize(
    "chunks",
    [[7], [100, 30, 20], *(pytest.param(n, marks=pytest.mark.full) for n in ([1], [64], [140, 10]))],
    ids=str,
)
def test_replay_is_the_same_for_any_chunks(model: Model, ids: I64, chunks: list[int]) -> None:
    logits, cache = replay(model, ids, [len(ids)])
    in_chunks, chunked = replay(model, ids, chunks)
    assert np.array_equal(in_chunks, logits)
    assert chunked.global_bytes() == cache.global_bytes()
    assert np.array_equal(decode(model, chunked, ids[:20]), decode(model, cache, ids[:20]))


def test_replay_of_a_prompt_within_the_window_is_exact(model: Model, ids: I64) -> None:
    short = ids[: model.config.window_size]
    assert np.array_equal(replay(model, short, [5])[0], exact(model, short, [len(short)])[0][-1])


def test_replay_writes_the_exact_encoder_and_entries(model: Model, ids: I64, whole: tuple[F32, bytes]) -> None:
    logits, cache = replay(model, ids, [50])
    assert cache.global_bytes() == whole[1]
    distance = float(np.linalg.norm(logits - whole[0][-1]) / np.linalg.norm(whole[0][-1]))
    print(f"replay: relative distance of the last logits to exact {distance:.3f}")
    assert 0 < distance < 0.5


def test_replay_goes_on_from_a_decoded_prefix(model: Model, ids: I64) -> None:
    """A second prefill shorter than the window continues the decoder's windows, so nothing is cut."""
    first, cache = model.new_cache(), model.new_cache()
    model.forward([(first, ids[:100])])
    model.forward([(cache, ids[:100])])
    output = model.prefill_replay(cache, ids[100:112], last=True)
    assert output is not None
    expected = model.logits(model.forward([(first, ids[100:112])]), slice(-1, None))
    assert np.array_equal(model.logits(output, slice(-1, None)), expected)


@pytest.mark.parametrize("length", [99, 100])
def test_taking_back_tokens_leaves_no_trace(model: Model, ids: I64, length: int) -> None:
    clean, tried = model.new_cache(), model.new_cache()
    model.forward([(clean, ids[:length])])
    model.forward([(tried, ids[:length])])
    model.forward([(tried, ids[120:126])])
    tried.truncate(length)
    assert np.array_equal(decode(model, tried, ids[100:130]), decode(model, clean, ids[100:130]))
    assert tried.global_bytes() == clean.global_bytes()


def test_released_decode_differs_through_index_keys(model: Model, ids: I64) -> None:
    """The test switch: with the released keys a decode at an even position scores against the ratio-1 keys."""
    own, released = model.new_cache(), model.new_cache()
    model.forward([(own, ids[:100])])
    model.forward([(released, ids[:100])])
    for layer in model.layers:
        layer.attention.own_keys = False
    try:
        as_released = decode(model, released, ids[100:108])
    finally:
        for layer in model.layers:
            layer.attention.own_keys = True
    differs = (as_released != decode(model, own, ids[100:108])).any(axis=1)
    assert differs[0]

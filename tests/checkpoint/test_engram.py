"""Engram's table rows, against values of the official code."""

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.engram import NO_TOKEN, EngramHash
from dsuf.checkpoint.shards import read_safetensors
from dsuf.checkpoint.token_map import TokenMap
from dsuf.errors import CheckpointError


@pytest.fixture(scope="module")
def released_hash(released: Path) -> EngramHash:
    token_map = TokenMap.from_tokenizer(released / "tokenizer.json")
    return EngramHash.from_config(load_config(released / "config.json"), token_map)


@pytest.fixture(scope="module")
def tiny_hash(golden: Path) -> EngramHash:
    token_map = TokenMap.from_tokenizer(golden / "tiny/tokenizer.json")
    return EngramHash.from_config(load_config(golden / "tiny/config.json"), token_map)


def test_released_constants(released_hash: EngramHash) -> None:
    assert released_hash.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert released_hash.primes[0, 0].tolist() == [
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
    ]  # fmt: skip
    assert released_hash.primes[1, 2].tolist() == [
        16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889,
    ]  # fmt: skip
    assert released_hash.primes.sum(axis=(1, 2)).tolist() == [384006168, 384016682]
    assert released_hash.pad_id == 2


def test_released_rows_of_a_sentence(released_hash: EngramHash) -> None:
    """The text is "The capital of France is"."""
    history = released_hash.history(np.array([671, 6102, 294, 8760, 344]))
    columns = [0, 1, 2, 23]
    first, second = (released_hash.rows(layer, history)[:, columns].tolist() for layer in (0, 1))
    assert first[0] == [5184683, 27616858, 44205083, 376990358]
    assert second[0] == [13339213, 20675680, 42296486, 370616412]
    assert first[4] == [8434518, 28335418, 33056762, 379106837]
    assert second[4] == [15511642, 19799350, 44525188, 380659356]


@pytest.mark.parametrize("case", ["nomask", "masked"])
def test_golden_rows(golden: Path, tiny_hash: EngramHash, case: str) -> None:
    data = read_safetensors(golden / "cases/engram_hash.safetensors")
    for name in ("multipliers", "primes", "offsets"):
        assert np.array_equal(getattr(tiny_hash, name), data[name])
    for text in range(2):
        alive = data["token_mask"][text] != 0 if case == "masked" else None
        history = tiny_hash.history(data["input_ids"][text], alive=alive)
        for layer in range(2):
            assert np.array_equal(tiny_hash.rows(layer, history), data[f"hash_ids_{case}"][text, :, layer])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_chunks_with_carry_give_the_whole(tiny_hash: EngramHash, data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 511), min_size=1, max_size=20)), np.int64)
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    before, parts = np.full(3, NO_TOKEN), []
    for start, stop in pairwise(cuts):
        chunk, mask = ids[start:stop], alive[start:stop]
        parts.append(tiny_hash.history(chunk, before, mask))
        before = tiny_hash.carry(chunk, before, mask)
    assert np.array_equal(np.concatenate(parts), tiny_hash.history(ids, alive=alive))


def test_text_after_a_picture_hashes_like_the_start_of_a_text(tiny_hash: EngramHash) -> None:
    ids = np.array([5, 6, 511, 7, 8, 9])
    alive = np.array([True, True, False, True, True, True])
    assert np.array_equal(tiny_hash.history(ids, alive=alive)[3:], tiny_hash.history(ids[3:]))


def test_tables_or_tokenizer_of_another_model_are_refused(golden: Path) -> None:
    config = load_config(golden / "tiny/config.json")
    token_map = TokenMap.from_tokenizer(golden / "tiny/tokenizer.json")
    with pytest.raises(CheckpointError, match="419 Engram ids"):
        EngramHash.from_config(msgspec.structs.replace(config, engram_compressed_vocab_size=420), token_map)
    with pytest.raises(CheckpointError, match="engram_num_embeddings"):
        EngramHash.from_config(msgspec.structs.replace(config, engram_num_embeddings=(2304, 3095)), token_map)

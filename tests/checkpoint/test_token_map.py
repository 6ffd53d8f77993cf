"""The Engram vocabulary of the released and of the golden tokenizer."""

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest

from dsuf.checkpoint.shards import read_safetensors
from dsuf.checkpoint.token_map import TokenMap
from dsuf.errors import CheckpointError


def test_released_tokenizer_gives_the_known_map_within_seconds(released: Path) -> None:
    started = time.process_time()
    token_map = TokenMap.from_tokenizer(released / "tokenizer.json")
    assert time.process_time() - started < 10
    digest = hashlib.sha256(token_map.ids.astype("<i4").tobytes()).hexdigest()
    assert (len(token_map.ids), token_map.size) == (129_280, 99_092)
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert token_map.ids[2] == 2


def test_golden_tokenizer_gives_the_golden_map(golden: Path) -> None:
    token_map = TokenMap.from_tokenizer(golden / "tiny/tokenizer.json")
    expected = read_safetensors(golden / "cases/engram_hash.safetensors")["token_map"]
    assert np.array_equal(token_map.ids, expected)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b'{"model": 1}'])
def test_unreadable_tokenizer_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot read the tokenizer") as caught:
        TokenMap.from_tokenizer(path)
    assert "\n" not in str(caught.value)

"""A model directory that has what a node reads before its engine: configuration and tokenizer."""

from pathlib import Path

import pytest

from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.vocabulary_cut import cut_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Released configuration, small vocabulary, no weights: enough for the scripted engine."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_bytes((RELEASED / "config.json").read_bytes())
    (folder / "tokenizer.json").write_bytes(cut_tokenizer(RELEASED / "tokenizer.json", 8192))
    return folder

"""The released vocabulary."""

from pathlib import Path

import pytest

import dsuf.checkpoint
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def released() -> Path:
    """The directory with the released tokenizer."""
    return Path(dsuf.checkpoint.__file__).parent / "released"


@pytest.fixture(scope="session")
def vocabulary(released: Path) -> Vocabulary:
    """The released tokenizer."""
    return load_vocabulary(released)

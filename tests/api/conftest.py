"""The released vocabulary and a server over scripted tickets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsuf.checkpoint
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary
from tests.api.rig import Rig, serve


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The released tokenizer."""
    return load_vocabulary(Path(dsuf.checkpoint.__file__).parent / "released")


@pytest.fixture
async def rig(vocabulary: Vocabulary) -> AsyncIterator[Rig]:
    """A server with the default settings."""
    async with serve(vocabulary) as running:
        yield running

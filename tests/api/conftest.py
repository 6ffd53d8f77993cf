"""The released vocabulary and a server over scripted tickets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

import dsuf.checkpoint
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary
from tests.api.rig import Rig, serve


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that nodes run on: how a lost connection shows is the loop's business."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The released tokenizer."""
    return load_vocabulary(Path(dsuf.checkpoint.__file__).parent / "released")


@pytest.fixture
async def rig(vocabulary: Vocabulary) -> AsyncIterator[Rig]:
    """A server with the default settings."""
    async with serve(vocabulary) as running:
        yield running

"""Failures that no part of the program expects: every turn ends nevertheless, and the others go on."""

from unittest.mock import patch

import pytest

from dsuf.errors import EngineFailed
from dsuf.kv.loader import Loader
from dsuf.kv.sessions import Sessions
from tests.toy import ToyEngine, make_turn
from tests.turns.clock import run_virtually
from tests.turns.node import serving


async def fail(*_: object, **__: object) -> None:
    """Raise what nobody raises on purpose."""
    raise AssertionError("unforeseen")


def test_a_cache_that_cannot_be_filled_ends_its_turn() -> None:
    async def main() -> None:
        async with serving(ToyEngine(), chunk_tokens=16) as node:
            with patch.object(Sessions, "restore", fail), pytest.raises(EngineFailed):
                await node.run(make_turn("a", range(1, 40)))
            turn = make_turn("b", range(1, 40))
            assert (await node.run(turn)).tokens == node.engine.cold_tokens(turn)

    run_virtually(main)


def test_a_loader_that_fails_costs_the_reuse_only() -> None:
    async def main() -> None:
        async with serving(ToyEngine(), chunk_tokens=16) as node:
            await node.run(make_turn("a", range(1, 40)))
            await node.forget_device()
            with patch.object(Loader, "load", fail):
                turn = make_turn("b", range(1, 40))
                reply = await node.run(turn)
            assert reply.tokens == node.engine.cold_tokens(turn) and reply.usage.cached_tokens == 0

    run_virtually(main)

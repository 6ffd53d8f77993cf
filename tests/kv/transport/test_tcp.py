"""A cache that came over real connections is the one that was kept: tokens, positions and pages as without the way."""

import asyncio
import random

import pytest

from dsuf.kv import giver, taker
from dsuf.kv.sessions import Restored
from tests.kv.rig import ids
from tests.kv.test_handoff import MODES
from tests.kv.test_mobility import resume_here
from tests.kv.transport.rig import Remote
from tests.toy import make_turn


@MODES
@pytest.mark.parametrize("length", [1, 8, 47, 100])
async def test_tokens_are_those_of_one_node_and_all_comes_from_the_peer(replay: int, length: int) -> None:
    async with Remote(replay_tokens=replay, deadline_s=5) as pair:
        restored, start = await pair.run(make_turn("a", ids(length, [3])))
        assert (restored, start) == (Restored(start=length, peer_tokens=length), 0)
        assert pair.peer.pulled_bytes == pair.server.served_bytes > 0


@MODES
@pytest.mark.parametrize("length", [1, 9, 48, 100])
async def test_the_next_turn_goes_on_elsewhere(replay: int, length: int) -> None:
    async with Remote(replay_tokens=replay, deadline_s=5) as pair:
        done = await pair.far.run(make_turn("a", ids(length, [3])))
        kept = len(done.conversation) - 1
        restored = await resume_here(pair, make_turn("b", (*done.conversation, 7, 8)))
        assert restored == Restored(start=kept, peer_tokens=kept)
        assert pair.computed == []


@MODES
async def test_long_prompts_are_taken_in_slices(monkeypatch: pytest.MonkeyPatch, replay: int) -> None:
    monkeypatch.setattr(giver, "OFFER_PAGES", 3)
    monkeypatch.setattr(taker, "PART_BLOCKS", 2)
    async with Remote(replay_tokens=replay, deadline_s=5) as pair:
        await pair.far.run(make_turn("a", ids(130)), chunk=130)
        restored, _ = await pair.run(make_turn("b", ids(130)))
        assert restored == Restored(start=129, peer_tokens=129)


@MODES
async def test_many_turns_at_once_share_the_connections(replay: int) -> None:
    rng = random.Random(replay)
    async with Remote(replay_tokens=replay, deadline_s=20, blocks=600, pages=200, max_turns=20) as pair:
        prompts = [[rng.randrange(500) for _ in range(rng.randint(30, 80))] for _ in range(12)]
        takes = [pair.taker.take(make_turn(str(number), prompt)) for number, prompt in enumerate(prompts)]
        assert await asyncio.gather(*takes) == [0] * 12
        assert pair.server.counters()["connections"] == 2
        for number, prompt in enumerate(prompts):
            restored = await resume_here(pair, make_turn(f"again {number}", prompt))
            assert restored.start >= len(prompt) - 1

"""What one node keeps of a conversation another can go on from: as much of it, and the tokens of a cold run."""

import random

import msgspec
import pytest

from dsuf.errors import CheckpointError
from dsuf.kv import giver, taker
from dsuf.kv.handoff import check_offer
from dsuf.kv.point import PointHead
from dsuf.kv.sessions import Restored
from dsuf.types import Span, Turn
from tests.kv.rig import ids, make_prompt_trace
from tests.kv.test_handoff import MODES, Pair
from tests.toy import WINDOW, make_turn


async def resume_here(pair: Pair, turn: Turn) -> Restored:
    """`turn` on the near node, which takes what the far one keeps; its tokens are compared with a cold run."""
    near = pair.near
    start = await pair.taker.take(turn, compute=False)
    pages = await near.sessions.admit(turn, peer_from=start)
    assert pages is not None
    near.engine.attach(turn, pages)
    restored = await near.sessions.restore(turn)
    assert restored is not None
    assert await near.compute(turn, restored.start) == near.engine.cold_tokens(turn)
    await near.end(turn)
    await near.settle()
    return restored


@MODES
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 47, 48, 49, 100])
async def test_the_next_turn_goes_on_elsewhere(replay: int, length: int) -> None:
    pair = Pair(replay_tokens=replay)
    done = await pair.far.run(make_turn("a", ids(length, [3])))
    kept = len(done.conversation) - 1  # the last token was never fed
    restored = await resume_here(pair, make_turn("b", (*done.conversation, 7, 8)))
    assert restored == Restored(start=kept, peer_tokens=kept)
    assert pair.computed == []
    await pair.close()


@MODES
@pytest.mark.parametrize("seed", range(4))
async def test_as_much_is_reused_there_as_here(monkeypatch: pytest.MonkeyPatch, replay: int, seed: int) -> None:
    """Prompts that share any part of what is kept, pictures and tenants: the peer begins where the keeper would."""
    monkeypatch.setattr(giver, "OFFER_PAGES", 3)
    monkeypatch.setattr(taker, "PART_BLOCKS", 2)
    rng, reused = random.Random(10 * replay + seed), 0
    for _ in range(6):
        pair = Pair(replay_tokens=replay, spare=rng.randrange(5), deadline_s=5)
        span = Span(start=(at := rng.randrange(40)), stop=at + rng.randint(1, 12), digest=b"picture")
        spans = rng.choice([(), (span,)])
        turn = make_turn("a", [rng.randrange(9) for _ in range(rng.randint(20, 90))], spans=spans, salt="x")
        conversation = (await pair.far.run(turn)).conversation
        if rng.random() < 0.5:
            await pair.near.run(make_turn("here", conversation[: rng.randint(1, 60)], salt="x"))
        shared = conversation[: rng.randint(1, len(conversation))]
        other = make_turn(
            "b", (*shared, *[rng.randrange(9) for _ in range(rng.randrange(20))]), spans=rng.choice([(), spans]),
            salt=rng.choice("xxxy"),
        )  # fmt: skip
        pair.far.sessions.pool.forget_all()
        there = await resume_here(pair, other)
        here = (await pair.far.run(other)).restored
        if len(other.prompt.ids) - there.start > 8:  # what misses a page at most is not asked for
            assert there.start >= here.start, (there, here, len(other.prompt.ids))
        reused += there.peer_tokens
        await pair.close()
    assert reused > 0


async def test_pages_alone_are_of_no_use_to_an_exact_engine() -> None:
    pair = Pair()
    await pair.far.run(make_turn("a", ids(60)), chunk=60)
    assert await resume_here(pair, make_turn("b", ids(30, [1, 2]))) == Restored()
    assert pair.giver.calls["read"] == 0
    await pair.close()


async def test_what_is_wanted_computed_after_all_is_computed() -> None:
    """The same turn asks for what is kept, then for all of it."""
    pair = Pair(replay_tokens=WINDOW)
    turn = make_turn("a", ids(60))
    assert await pair.taker.take(turn, compute=False) is None
    assert pair.computed == []
    assert await pair.taker.take(turn) == 0
    assert pair.computed[-1] == 60
    await pair.close()


@pytest.mark.parametrize(
    "change",
    [
        {"length": 43}, {"anchor_tokens": 41}, {"anchor_tokens": -8}, {"anchor_tokens": 4096}, {"ids": b""},
        {"spans": (Span(start=3, stop=5, digest=b"picture"),)}, {"spans": (Span(start=40, stop=42, digest=b""),)},
        {"spans": (Span(start=500, stop=502, digest=b""),)}, {"stateful": False}, {"spare": -9}, {"payload_bytes": -1},
    ],
    ids=str,
)  # fmt: skip
async def test_pitfall_12_a_point_of_something_else_is_refused(change: dict[str, object]) -> None:
    pair = Pair()
    await pair.far.run(turn := make_turn("a", ids(44)))
    trace = make_prompt_trace((*turn.prompt.ids, 5, 6, 7), layout=pair.far.engine.layout)
    offer = await pair.giver.offer(make_turn("b", (*turn.prompt.ids, 5, 6, 7)), 0, compute=False)
    assert offer is not None
    point = offer.point
    assert isinstance(point, PointHead)
    assert check_offer(offer, trace, 0).length == point.length
    bad = msgspec.structs.replace(point, **change)
    with pytest.raises(CheckpointError):
        check_offer(msgspec.structs.replace(offer, point=bad), trace, 0)
    for other in ({"tail": None}, {"extent": msgspec.structs.replace(offer.extent, stop=48)}):
        with pytest.raises(CheckpointError):
            check_offer(msgspec.structs.replace(offer, **other), trace, 0)
    await pair.giver.leave(make_turn("b", ()))
    await pair.close()

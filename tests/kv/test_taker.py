"""Offers overlap: while one comes, the next is asked for and read; what counts is still the order."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from dsuf.kv import giver, taker
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.sessions import Restored
from dsuf.kv.trace import Trace
from dsuf.kv.transport import peer
from dsuf.kv.transport.wire import Order
from dsuf.types import Turn
from tests.kv.rig import ids, make_prompt_trace, make_small_arena, publish
from tests.kv.test_handoff import MODES, Pair, until
from tests.kv.transport.rig import Remote
from tests.toy import make_turn


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers of four pages, which are read one by one."""
    monkeypatch.setattr(giver, "OFFER_PAGES", 4)
    monkeypatch.setattr(taker, "PART_BLOCKS", 1)


@MODES
@pytest.mark.usefixtures("slices")
async def test_the_next_offer_comes_before_the_one_before_is_published(replay: int) -> None:
    """The last block of the first offer is held up: the second one comes, and nothing is found yet."""
    pair, gate, begun = Pair(replay_tokens=replay, deadline_s=5), asyncio.Event(), list[int]()
    read = pair.giver.read

    async def hold(offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        begun.append(offer.extent.start)
        if not offer.extent.start and pieces[0] == offer.pages[-1]:
            await gate.wait()
        await read(offer, pieces, into)

    pair.giver.read = hold  # type: ignore[method-assign]
    await pair.far.run(make_turn("a", ids(100)), chunk=100)
    taking = asyncio.ensure_future(pair.run(make_turn("b", ids(100)), compute=False))
    await until(lambda: 32 in begun)
    assert not pair.giver.calls["release"]
    assert pair.near.arena.counters()["entries"] == 0
    gate.set()
    restored, start = await taking
    assert (restored, start) == (Restored(start=99, peer_tokens=99), 0)
    assert begun == sorted(begun)
    await pair.close()


@pytest.mark.usefixtures("slices")
async def test_so_many_reads_are_under_way_and_no_more() -> None:
    pair, busy, most = Pair(deadline_s=5), set[int](), 0
    read = pair.giver.read

    async def count(offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        nonlocal most
        busy.add(pieces[0].block)
        most = max(most, len(busy))
        await asyncio.sleep(0.002)
        await read(offer, pieces, into)
        busy.discard(pieces[0].block)

    pair.giver.read = count  # type: ignore[method-assign]
    await pair.far.run(make_turn("a", ids(100)), chunk=100)
    await pair.run(make_turn("b", ids(100)), compute=False)
    assert taker.READS_AT_ONCE <= most <= 2 * taker.READS_AT_ONCE
    await pair.close()


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("damaged", [0, 1, 2])
async def test_nothing_counts_that_stands_on_damage(damaged: int) -> None:
    """Offers before the damaged one stay, those after it, which may have come already, do not."""
    pair, seen = Pair(deadline_s=5, replay_tokens=8), 0

    def damage(views: Sequence[memoryview]) -> None:
        nonlocal seen
        seen += 1
        if seen == 4 * damaged + 4:
            views[0][3] ^= 1

    pair.giver.damage = damage
    await pair.far.run(make_turn("a", ids(100)), chunk=100)
    restored, _ = await pair.run(make_turn("b", ids(100)), compute=False)
    assert restored.peer_tokens == max(0, 32 * damaged - 8)
    assert pair.near.count("checksum_failures_total") == 1
    await pair.close()


@pytest.mark.parametrize("links", ["true", "none", "wrong", "cut"])
async def test_digests_that_a_peer_tells_only_find(monkeypatch: pytest.MonkeyPatch, links: str) -> None:
    """Wrong ones find nothing, which costs reuse alone; where their number is wrong they are made here."""
    pack = peer.pack_turn

    def tell(turn: Turn, trace: Trace | None = None) -> Order:
        order = pack(turn, trace)
        told = {"true": order.links, "none": b"", "wrong": bytes(len(order.links)), "cut": order.links[:-1]}
        assert len(order.links) == 16 * (len(turn.prompt.ids) // 8)
        return msgspec.structs.replace(order, links=told[links])

    monkeypatch.setattr(peer, "pack_turn", tell)
    async with Remote(deadline_s=5, replay_tokens=8) as pair:
        await pair.far.run(make_turn("a", ids(60)))
        restored, _ = await pair.run(make_turn("b", ids(60, [7, 8])), compute=False)
        assert (restored.peer_tokens >= 48) == (links != "wrong")
        assert restored.peer_tokens == 0 or links != "wrong"


async def test_a_turn_that_was_only_looked_for_can_be_ordered() -> None:
    """What is not to be computed travels without being unpacked, so the peer asks for it again."""
    async with Remote(deadline_s=5) as pair:
        turn = make_turn("a", ids(60))
        assert await pair.peer.offer(turn, 0, compute=False) is None
        pages = 0
        while (offer := await pair.peer.offer(turn, pages, compute=True)) is not None and offer.point is None:
            pages = offer.extent.stop // 8
            assert await pair.peer.release(offer)
        assert pair.computed[-1] == 60
        await pair.peer.leave(turn)


def test_what_follows_is_published_after_what_it_follows() -> None:
    arena = make_small_arena(20)
    trace = make_prompt_trace([1] * 40)
    first = arena.reserve(make_prompt_trace([1] * 16), 16, 30)
    assert first is not None
    second = arena.reserve(trace, 40, 30, first)
    assert second is not None
    assert (second.first_page, len(second.pages)) == (2, 3)
    assert publish(arena, first) is not None
    assert publish(arena, second) is not None
    assert arena.kept_pages(trace) == 5
    arena.clear()
    assert arena.blocks.free == 20


@pytest.mark.parametrize("early", [True, False])
def test_what_follows_something_that_is_not_there_is_not_published(early: bool) -> None:
    """It comes too early, or what it follows was given up; its blocks come back."""
    arena = make_small_arena(20)
    trace = make_prompt_trace([1] * 40)
    first = arena.reserve(make_prompt_trace([1] * 16), 16, 30)
    assert first is not None
    second = arena.reserve(trace, 40, 30, first)
    assert second is not None
    if not early:
        arena.abandon(first)
    assert publish(arena, second) is None
    assert arena.kept_pages(trace) == 0
    arena.abandon(first)
    assert arena.blocks.free == 20

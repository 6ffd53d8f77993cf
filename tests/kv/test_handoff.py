"""A prompt that one engine computes and another goes on from: tokens as from one engine, whatever fails on the way."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from dsuf.errors import CheckpointError
from dsuf.kv import giver, keeper, loader, taker
from dsuf.kv.calls import see_through
from dsuf.kv.giver import LocalGiver
from dsuf.kv.handoff import Offer, Piece, check_offer
from dsuf.kv.sessions import Restored
from dsuf.kv.taker import Taker
from dsuf.kv.trace import Trace
from dsuf.types import PrefillRange, StepPlan, Turn
from tests.kv.rig import Rig, ids, make_prompt_trace
from tests.toy import WINDOW, make_turn

MODES = pytest.mark.parametrize("replay", [0, WINDOW, 8], ids=["exact", "replay6", "replay8"])


class Pair:
    """A node that prefills, and one that takes its prompts and decodes them."""

    def __init__(self, *, deadline_s: float = 5.0, lease_s: float = 30.0, blocks: int = 200, **engine: Any) -> None:
        self.far, self.near = Rig(blocks=blocks, **engine), Rig(blocks=blocks, **engine)
        self.computed: list[int] = []
        self.on_chunk: Callable[[], None] = lambda: None
        self.giver = Faulty(self.far.sessions, self.compute, lease_s=lease_s)
        self.taker = Taker(self.near.sessions, self.giver, self.near.metrics, deadline_s=deadline_s)

    async def compute(self, turn: Turn) -> None:
        """Prefill on the far node; what is there is kept after each chunk, and the state at the end."""
        far, length = self.far, len(turn.prompt.ids)
        turn = msgspec.structs.replace(turn, sampling=msgspec.structs.replace(turn.sampling, max_tokens=1))
        try:
            restored = await see_through(far.begin(turn))  # as a scheduler, which lets no page go in the midst of it
            for start in range(restored.start, length, 16):
                stop = min(start + 16, length)
                step = asyncio.ensure_future(far.engine.step(StepPlan(prefill=(PrefillRange(turn.id, start, stop),))))
                if stop == length:
                    await far.sessions.commit(turn, length, step)
                await step
                far.sessions.advance(turn.id, stop)
                self.computed.append(stop)
                if stop < length:
                    await far.sessions.commit_pages(turn, stop)
                self.on_chunk()
        finally:
            while any(turn.id in names for names in far.engine._under_way):  # noqa: ASYNC110
                await asyncio.sleep(0.0001)
            far.engine.detach(turn.id)
            far.sessions.release(turn.id)

    async def run(self, turn: Turn, compute: bool = True) -> tuple[Restored, int | None]:
        """Take the prompt, go on from it, and compare the tokens with a cold run."""
        start = await self.taker.take(turn, compute)
        near = self.near
        pages = await near.sessions.admit(turn, peer_from=start)
        assert pages is not None
        near.engine.attach(turn, pages)
        restored = await near.sessions.restore(turn)
        assert restored is not None
        assert restored.start == restored.device_tokens + restored.host_tokens + restored.peer_tokens
        assert await near.compute(turn, restored.start) == near.engine.cold_tokens(turn)
        await near.end(turn)
        await near.settle()
        return restored, start

    async def close(self) -> None:
        """Nothing is left on either side."""
        while self.taker._leaving:
            await asyncio.wait(self.taker._leaving)
        await until(lambda: self.giver._orders == self.giver._lent == {})
        for rig in (self.far, self.near):
            await rig.settle()
            await until(lambda rig=rig: not rig.sessions.counters()["filling"])  # type: ignore[misc]
            await rig.close()


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


class Faulty(LocalGiver):
    """A giver of which each call can be made to fail: `fault` is asked with its name and how often it was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: Counter[str] = Counter()
        self.fault: Callable[[str, int], float] = lambda name, number: 0.0
        self.damage: Callable[[Sequence[memoryview]], None] = lambda views: None

    async def _ask(self, name: str) -> None:
        self.calls[name] += 1
        if seconds := self.fault(name, self.calls[name]):
            await asyncio.sleep(seconds)

    async def offer(
        self, turn: Turn, pages: int, compute: bool = True, trace: Trace | None = None, patience_s: float = 0.5
    ) -> Offer | None:  # fmt: skip
        await self._ask("offer")
        return await super().offer(turn, pages, compute, trace, patience_s)

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        await self._ask("read")
        await super().read(offer, pieces, into)
        self.damage(into)

    async def release(self, offer: Offer) -> bool:
        await self._ask("release")
        return await super().release(offer)

    async def leave(self, turn: Turn) -> None:
        await self._ask("leave")
        await super().leave(turn)


@MODES
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 47, 48, 49, 100])
async def test_tokens_are_those_of_one_node_and_all_comes_from_the_peer(replay: int, length: int) -> None:
    pair = Pair(replay_tokens=replay)
    restored, start = await pair.run(make_turn("a", ids(length, [3])))
    assert (restored, start) == (Restored(start=length, peer_tokens=length), 0)
    assert pair.near.count("handoff_tokens_total") == length + 1
    assert pair.near.count('handoffs_total{result="taken"}') == 1
    await pair.close()


@MODES
async def test_chunks_are_taken_while_prefill_goes_on(replay: int) -> None:
    pair, here = Pair(replay_tokens=replay), list[int]()
    turn = make_turn("a", ids(100))

    def look() -> None:
        trace = make_prompt_trace(turn.prompt.ids, layout=pair.near.engine.layout)
        path = pair.near.arena.tree.walk(trace)
        here.append(sum(node.host is not None for node in path) * 8)

    pair.on_chunk = look
    pair.far.engine.step_s = lambda plan: 0.01
    await pair.run(turn)
    assert pair.computed == [16, 32, 48, 64, 80, 96, 100]
    assert here[-1] >= 64, here
    assert here == sorted(here)
    assert all(done <= computed for done, computed in zip(here, pair.computed, strict=True))
    await pair.close()


@MODES
async def test_long_prompts_are_taken_in_slices(monkeypatch: pytest.MonkeyPatch, replay: int) -> None:
    for module, name in ((keeper, "SLICE"), (loader, "SLICE"), (giver, "OFFER_PAGES"), (taker, "PART_BLOCKS")):
        monkeypatch.setattr(module, name, 3)
    pair = Pair(replay_tokens=replay)
    await pair.far.run(make_turn("a", ids(130)), chunk=130)
    restored, _ = await pair.run(make_turn("b", ids(130)))
    assert restored == Restored(start=129, peer_tokens=129)
    assert pair.giver.calls["read"] == 6
    assert pair.near.arena.counters()["entries"] == 2
    await pair.close()


@MODES
async def test_what_is_here_already_is_not_taken(replay: int) -> None:
    pair = Pair(replay_tokens=replay)
    await pair.near.run(make_turn("a", ids(60)))
    pair.near.sessions.pool.forget_all()
    restored, start = await pair.run(make_turn("b", ids(60, range(30))))
    assert start == 56
    assert restored == Restored(start=89, host_tokens=56, peer_tokens=33)
    await pair.close()


async def test_pitfall_14_a_giver_that_is_not_reached_is_left_alone_for_a_time() -> None:
    """The first turn pays its deadline, those after it do not; later it is asked again, and then serves again."""
    pair, loop = Pair(deadline_s=0.1, lease_s=0.3), asyncio.get_running_loop()
    pair.giver.fault = lambda name, number: 0.2 if name == "offer" else 0.0
    for time in (1, 2):
        assert await pair.taker.take(make_turn(str(time), range(100 * time, 100 * time + 40))) is None
        assert pair.taker._avoid_until_s > loop.time()
        assert pair.taker._avoid_s == 0.1 * 2**time
        pair.taker._avoid_until_s += 60
        await pair.run(make_turn("meanwhile", range(300 + 100 * time, 340 + 100 * time)))
        assert pair.giver.calls["offer"] == time
        pair.taker._avoid_until_s = 0.0
    pair.giver.fault = lambda name, number: 0.0
    restored, _ = await pair.run(make_turn("again", range(600, 660)))
    assert restored.peer_tokens > 0
    assert pair.taker._avoid_s == 0.1
    await pair.close()


async def test_what_is_there_already_is_not_computed() -> None:
    pair = Pair()
    await pair.far.run(make_turn("a", ids(60)))
    restored, _ = await pair.run(make_turn("b", ids(60)))
    assert restored == Restored(start=59, peer_tokens=59)
    assert pair.computed == []
    await pair.close()


async def test_nothing_is_asked_for_where_little_is_missing() -> None:
    pair = Pair()
    await pair.near.run(make_turn("a", ids(60)))
    restored, start = await pair.run(make_turn("b", ids(60)))
    assert (start, restored.peer_tokens, restored.start) == (None, 0, 59)
    assert pair.giver.calls.total() == 0
    await pair.close()


async def test_the_far_node_goes_on_from_what_it_has() -> None:
    pair = Pair(replay_tokens=8)
    await pair.run(make_turn("a", ids(60)))
    pair.computed.clear()
    restored, _ = await pair.run(make_turn("b", ids(60, range(30))))
    assert pair.computed[0] > 60
    assert restored.peer_tokens > 0
    await pair.close()


@pytest.mark.parametrize(("replay", "fault"), [(0, "raises"), (WINDOW, "raises"), (8, "raises"), (0, "hangs")])
@pytest.mark.parametrize("call", ["offer", "read", "release", "leave"])
@pytest.mark.parametrize("number", [1, 2])
async def test_a_failure_at_each_stage_is_computed_here(replay: int, call: str, number: int, fault: str) -> None:
    pair = Pair(replay_tokens=replay, deadline_s=0.25)

    def fail(name: str, count: int) -> float:
        if (name, count) != (call, number):
            return 0.0
        if fault == "raises":
            raise ConnectionError("gone")
        return 0.4

    pair.giver.fault = fail
    pair.far.engine.step_s = lambda plan: 0.002
    restored, start = await pair.run(make_turn("a", ids(70)))
    failed = pair.near.count('handoffs_total{result="failed"}') if call != "leave" else 1
    assert failed == 1
    if call == "leave":
        assert restored.peer_tokens == 69
    else:
        assert restored.peer_tokens < 69
        assert (start is None) == (number == 1)
    await LocalGiver.leave(pair.giver, make_turn("a", ids(70)))
    await pair.close()


@MODES
async def test_a_prompt_that_cannot_be_computed_there_is_computed_here(replay: int) -> None:
    pair, chunks = Pair(replay_tokens=replay), [1, 1]

    def before(name: str) -> float:
        if name == "step" and not chunks:
            raise ConnectionError("gone")
        return 0.0 if name != "step" else 0.0 * chunks.pop()

    pair.far.engine.before = before
    restored, start = await pair.run(make_turn("a", ids(70)))
    assert pair.near.count('handoffs_total{result="failed"}') == 1
    assert start == 0
    assert restored.peer_tokens == (32 - replay if replay else 0)
    await pair.close()


@pytest.mark.parametrize("block", range(8))
async def test_one_flipped_bit_in_any_block_is_found(block: int) -> None:
    """40 positions are five pages, and a state of a block."""
    pair = Pair()

    def damage(views: Sequence[memoryview]) -> None:
        if len(views) > block:
            views[block][len(views[block]) // 2] ^= 1
        pair.giver.damage = lambda views: None

    pair.on_chunk = lambda: None
    pair.far.sessions.commit_pages = lambda turn, length: asyncio.ensure_future(asyncio.sleep(0))  # type: ignore
    pair.giver.damage = damage
    restored, start = await pair.run(make_turn("a", ids(45)))
    hit = block < 7
    assert pair.near.count("checksum_failures_total") == hit
    assert (start, restored.peer_tokens) == ((None, 0) if hit else (0, 44))
    await pair.close()


async def test_pitfall_15_what_was_read_after_the_lease_counts_for_nothing() -> None:
    """The giver's blocks are written anew while the reader still reads; afterwards the lease is no good."""
    pair = Pair(lease_s=0.02, deadline_s=0.5, blocks=12)

    def fault(name: str, number: int) -> float:
        return 0.06 if name == "release" else 0.0

    pair.giver.fault = fault
    restored, start = await pair.run(make_turn("a", ids(40)))
    assert (start, restored.start) == (None, 0)
    assert pair.near.count('handoffs_total{result="failed"}') == 1
    assert pair.far.sessions.counters()["leases"] == 0
    await pair.close()


async def test_pitfall_15_blocks_that_are_still_written_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taker gives up; the bytes that come later fall into nobody's rows."""
    pair = Pair(deadline_s=0.05)
    monkeypatch.setattr(taker, "AVOID_MOST_S", 0.0)
    read = pair.giver.read

    async def read_late(*args: Any) -> None:
        await see_through(asyncio.sleep(0.3))
        await read(*args)

    monkeypatch.setattr(pair.giver, "read", lambda *args: see_through(read_late(*args)))
    turn = make_turn("a", ids(40))
    assert await pair.taker.take(turn) is None
    monkeypatch.undo()
    counters = pair.near.sessions.counters()
    assert counters["filling"]
    assert counters["bytes"] > 0, "blocks stay away from others"
    await pair.near.run(make_turn("b", ids(50)))
    await until(lambda: not pair.near.sessions.counters()["filling"])
    await pair.run(turn)
    await pair.close()


@pytest.mark.parametrize("change", ["head", "ids", "start", "pages", "point", "spans", "checksums", "key"])
async def test_pitfall_12_an_offer_of_something_else_is_refused(change: str) -> None:
    pair = Pair()
    turn = make_turn("a", ids(45))
    await pair.compute(turn)
    await pair.far.settle()
    trace = make_prompt_trace(turn.prompt.ids, layout=pair.far.engine.layout)
    offer = await pair.giver.offer(turn, 0)
    while offer is not None and offer.point is None:
        await pair.giver.release(offer)
        offer = await pair.giver.offer(turn, 0)
    assert offer is not None
    assert offer.point is not None
    check_offer(offer, trace, 0)
    point = offer.point
    other = {
        "head": {"head": b"other weights"},
        "ids": {"ids": offer.ids[:-1] + b"\1"},
        "start": {"extent": msgspec.structs.replace(offer.extent, start=8)},
        "pages": {"pages": offer.pages[:-1]},
        "key": {"extent": msgspec.structs.replace(offer.extent, key=trace.chain[1])},
        "checksums": {"checksums": offer.checksums[:-1]},
        "point": {"point": msgspec.structs.replace(point, ids=b"\1" + point.ids[1:])},
        "spans": {"point": msgspec.structs.replace(point, length=44)},
    }[change]
    with pytest.raises(CheckpointError):
        check_offer(msgspec.structs.replace(offer, **other), trace, 0)
    await pair.giver.leave(turn)
    assert not await pair.giver.release(offer)
    await pair.close()


@MODES
@pytest.mark.parametrize("seed", range(3))
async def test_pitfall_15_nobody_sees_foreign_rows_whatever_is_late(
    monkeypatch: pytest.MonkeyPatch, replay: int, seed: int
) -> None:
    """Many prompts over small arenas on both sides, with calls that fail or come late, leases that end early, and
    takers that leave."""
    rng = random.Random(100 * replay + seed)
    monkeypatch.setattr(taker, "AVOID_MOST_S", 0.0)
    pair = Pair(replay_tokens=replay, deadline_s=0.05, lease_s=0.02, blocks=24, pages=24)
    ends: Counter[str] = Counter()

    def fault(name: str, number: int) -> float:
        if rng.random() < 0.08:
            raise ConnectionError("gone")
        return rng.choice((0.015, 0.1)) if rng.random() < 0.15 else 0.0

    pair.giver.fault = fault
    for number in range(60):
        turn = make_turn(str(number), ids(rng.randint(1, 60), [rng.randrange(5)] * rng.randint(0, 20)))
        if rng.random() < 0.2:
            try:
                async with asyncio.timeout(rng.choice((0.001, 0.004))):
                    await pair.taker.take(turn)
            except TimeoutError:
                ends["left"] += 1
        restored, _ = await pair.run(turn)
        ends["peer" if restored.peer_tokens else "own"] += 1
    assert min(ends["peer"], ends["own"], ends["left"]) > 0, ends
    await pair.close()

"""What went wrong with kept caches elsewhere, one test each; the numbers are those of the list of known pitfalls.

More of 12 is in `test_prefix.py`, more of 15 in `test_handoff.py`.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from dsuf.errors import EngineFailed
from dsuf.kv import keeper, trace
from dsuf.kv.arena import Arena
from dsuf.kv.keeper import Keeper
from dsuf.kv.point import CommitPoint
from dsuf.types import Span
from tests.kv.rig import Done, Rig, ids
from tests.kv.test_handoff import Pair
from tests.toy import WINDOW, make_turn

MODES = pytest.mark.parametrize("replay", [0, WINDOW, 8], ids=["exact", "replay6", "replay8"])
MORE = [3, 1, 4, 1, 5, 9, 2, 6, 5]


async def run(rig: Rig, prompt: Sequence[int], **options: Any) -> Done:
    """Run a turn and compare its tokens with a cold run."""
    turn = make_turn("turn", prompt, **options)
    done = await rig.run(turn)
    assert done.ids == rig.engine.cold_tokens(turn)
    rig.check_idle()
    return done


@MODES
@pytest.mark.parametrize("source", ["device", "host", "peer"])
async def test_pitfall_10_prefix_without_window(replay: int, source: str) -> None:
    """Restored at every length around multiples of 2 and of a page, and 64 tokens on, as cold."""
    for length in range(1, 35):
        pair = Pair(replay_tokens=replay)
        turn = make_turn("b", ids(length, MORE), max_tokens=64)
        if source == "peer":
            restored, _ = await pair.run(turn)
            assert restored.peer_tokens == len(turn.prompt.ids) - 1
        else:
            await pair.near.run(make_turn("a", ids(length), max_tokens=1))
            if source == "host":
                pair.near.sessions.pool.forget_all()
            assert (await pair.near.begin(turn)).start == length
            assert await pair.near.compute(turn, length) == pair.near.engine.cold_tokens(turn)
            await pair.near.end(turn)
        await pair.close()


async def test_pitfall_10_pages_without_a_state_are_of_no_use_where_the_window_is_not_replayed() -> None:
    rig = Rig(replay_tokens=0, blocks=0)
    await run(rig, ids(64))
    assert rig.sessions.counters()["pages_cached"] == 8
    assert (await run(rig, ids(64, MORE))).restored.start == 0
    await rig.close()


@MODES
async def test_pitfall_11_hits_only_for_the_whole_prefix(replay: int) -> None:
    """Reused tokens rise with what two prompts share; up to a page and a window, or to a commit point, are computed."""
    shared, reused = range(0, 100, 3), list[int]()
    for tokens in shared:
        rig = Rig(replay_tokens=replay, pages=100)
        await rig.run(make_turn("a", ids(100)), chunk=16)
        reused.append((await run(rig, ids(tokens, range(3, 40)))).restored.start)
        await rig.close()
    assert reused == sorted(reused)
    assert all(start <= tokens for start, tokens in zip(reused, shared, strict=True))
    if replay:
        assert all(tokens - start < 8 + replay for start, tokens in zip(reused, shared, strict=True) if tokens > 16)
    else:
        assert set(reused) >= {0, 16, 32, 48, 80, 96}, "commit points at chunk ends, each half as long again"


async def test_pitfall_12_a_key_that_says_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants and pictures change the rows; with all hashes equal too, nobody gets those of another."""
    picture = Span(start=5, stop=20, digest=b"a")
    changes: list[dict[str, Any]] = [
        {"salt": "tenant"},
        {"spans": (msgspec.structs.replace(picture, digest=b"b"),)},
        {"spans": (msgspec.structs.replace(picture, start=4),)},
        {"spans": (msgspec.structs.replace(picture, stop=21),)},
        {"spans": ()},
    ]
    for collide in (False, True):
        for replay in (0, 8):
            if collide:
                monkeypatch.setattr(trace, "digest", lambda previous, content: b"always the same")
            rig = Rig(replay_tokens=replay)
            base: dict[str, Any] = {"spans": (picture,)}
            await run(rig, ids(40), **base)
            for change in changes:
                done = await run(rig, ids(40, [1]), **(base | change))
                assert done.restored.start <= 5
            assert (await run(rig, ids(40, [1]), **base)).restored.start >= 40
            assert (await run(rig, (*ids(3), 7, *ids(40)[4:]), **base)).restored.start <= 3
            await rig.close()


@MODES
async def test_pitfall_13_one_flipped_bit_in_each_part_of_an_entry(replay: int) -> None:
    rng = random.Random(replay)
    for part in ["page 0", "page 2", "tail", "payload", "length", "ids", "spare", "checksum", "page checksum"]:
        rig = Rig(replay_tokens=replay)
        await run(rig, ids(29), max_tokens=1)
        rig.sessions.pool.forget_all()
        [point] = [point for point in rig.arena._points if point.head.length == 29]
        damage(rig.arena, point, part, rng)
        before = rig.arena.counters()["entries"]
        done = await run(rig, ids(29, [1]))
        assert done.restored.start < 29
        seen = rig.count("checksum_failures_total"), rig.count("withdrawn_total")
        missed = part in ("length", "ids") and seen == (0, 0)  # then it is not even found
        assert missed or seen == (1, 1), part
        assert point.state == ("ready" if missed else "absent"), part
        assert rig.arena.counters()["entries"] >= before
        assert (await run(rig, ids(29, [1]))).restored.start == 29
        await rig.close()


def damage(arena: Arena, point: CommitPoint, part: str, rng: random.Random) -> None:
    """Flip one bit."""
    assert point.page is not None
    pages = list(point.page.chain())[::-1]
    head, replace = point.head, msgspec.structs.replace
    blocks = {"page 0": pages[0].block, "page 2": pages[2].block, "tail": point.tail, "payload": point.blocks[0]}
    if part in blocks:
        size = head.payload_bytes if part == "payload" else arena.blocks.block_bytes
        block = blocks[part]
        assert block is not None
        arena.blocks.view(block)[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif part == "length":
        point.head = replace(head, length=head.length ^ 1)
    elif part == "ids":
        point.head = replace(head, ids=flip(head.ids, rng))
    elif part == "spare":
        point.head = replace(head, spare=head.spare ^ 1)
    elif part == "checksum":
        point.checksum = flip(point.checksum, rng)
    else:
        pages[1].checksum = flip(pages[1].checksum, rng)


def flip(data: bytes, rng: random.Random) -> bytes:
    """`data` with one bit changed."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


STEPS = {
    "describe": (keeper, "_describe"),
    "name": (Keeper, "_name"),
    "look": (Arena, "find_exact"),
    "reserve": (Arena, "reserve"),
    "read": (Rig, ""),
    "seal": (Keeper, "_seal"),
    "publish": (Arena, "publish"),
    "tell": (Keeper, "_publish"),
}


@MODES
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kill", [EngineFailed, asyncio.CancelledError])
async def test_pitfall_13_broken_off_at_each_step_of_storing(
    monkeypatch: pytest.MonkeyPatch, replay: int, step: str, kill: type[BaseException]
) -> None:
    """The next turn's tokens are right, and no block or page is lost."""
    rig = Rig(replay_tokens=replay)
    times = [1, 1, 1]

    def fail(*_: object) -> Any:
        raise kill("no")

    with monkeypatch.context() as patch:
        where, name = STEPS[step]
        if step == "read":
            rig.engine.before = lambda name: fail() if name == "read_pages" and times and times.pop() else 0.0
        else:
            patch.setattr(where, name, fail)
        with contextlib.suppress(asyncio.CancelledError, EngineFailed):
            turn = make_turn("a", ids(43))
            restored = await rig.begin(turn)
            with contextlib.suppress(kill):
                assert await rig.compute(turn, restored.start) == rig.engine.cold_tokens(turn)
            with contextlib.suppress(kill):
                await rig.end(turn)
            rig.engine.detach("a")
            rig.sessions.release("a")
            await rig.settle()
    rig.engine.before = lambda name: 0.0
    rig.check_idle()
    assert (await run(rig, ids(43, [1]))).restored.start <= 43
    assert (await run(rig, ids(43, [1]))).restored.start == 43
    await rig.close()


async def test_pitfall_15_blocks_into_which_the_engine_still_writes_are_not_given_out() -> None:
    """The copy is given up; its rows come later, and fall into nobody's blocks."""
    rig = Rig(deadline_s=0.05, blocks=14)
    slow = [1]
    rig.engine.before = lambda name: 0.2 if name == "read_pages" and slow and slow.pop() else 0.0
    turn = make_turn("a", ids(20), max_tokens=1)
    restored = await rig.begin(turn)
    await rig.compute(turn, restored.start)
    await rig.end(turn)
    await rig.settle()
    assert rig.sessions.counters()["filling"] > 0
    free = rig.arena.blocks.free
    assert free < 14
    await rig.engine.read_pages([], [])
    await asyncio.sleep(0)
    assert rig.sessions.counters()["filling"] == 0
    assert rig.arena.blocks.free > free
    await run(rig, ids(20))
    await rig.close()


async def test_pitfall_15_pages_are_free_only_when_nobody_reads_them() -> None:
    """A turn that is over keeps its pages until they are copied, whoever waits for room."""
    rig = Rig(pages=8)
    rig.engine.before = lambda name: 0.05 if name == "read_pages" else 0.0
    turn = make_turn("a", ids(40))
    restored = await rig.begin(turn)
    expected = await rig.compute(turn, restored.start)
    await rig.end(turn)
    assert rig.sessions.pool.held == 7
    other = make_turn("b", ids(40)[::-1])
    assert await rig.sessions.admit(other) is None
    await rig.settle()
    await run(rig, ids(40)[::-1])
    done = await run(rig, (*ids(40), *expected, 1))
    assert done.restored.start == 47
    await rig.close()

"""Session caches over the toy engine: what turns take over and leave behind, and that no failure reaches a turn.

Every turn's tokens are compared with those of an engine that computes everything.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from dsuf.errors import CheckpointError, ContextTooLong, EngineFailed
from dsuf.kv import keeper, loader
from dsuf.kv.directory.entry import describe_coming
from dsuf.kv.directory.shelf import Shelf
from dsuf.kv.sessions import Restored
from dsuf.types import Turn
from tests.kv.rig import Done, Rig, check_books, ids
from tests.toy import WINDOW, make_turn

MODES = pytest.mark.parametrize("replay", [0, WINDOW, 8], ids=["exact", "replay6", "replay8"])


async def run(rig: Rig, name: str, prompt: Sequence[int], chunk: int = 16, drafts: int = 0, **options: object) -> Done:
    """Run a turn and compare its tokens with a cold run."""
    turn = make_turn(name, prompt, **options)  # type: ignore[arg-type]
    done = await rig.run(turn, chunk=chunk, drafts=drafts)
    assert done.ids == rig.engine.cold_tokens(turn)
    rig.check_idle()
    return done


@MODES
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("device", [True, False])
async def test_the_next_turn_takes_over_prompt_and_reply(replay: int, drafts: int, device: bool) -> None:
    rig, prompt = Rig(replay_tokens=replay, stop_every=30), ids(43)
    for number in range(6):
        if not device:
            rig.sessions.pool.forget_all()
        done = await run(rig, str(number), prompt, drafts=drafts, max_tokens=12)
        if number:
            assert len(prompt) - done.restored.start <= 4, "three new tokens, and the last of the reply"
            whole = done.restored.start // 8 * 8
            assert done.restored.device_tokens == (whole if device else 0)
        prompt = (*done.conversation, 5, 6, number)
    assert rig.count('lookups_total{result="hit"}') == 5
    await rig.close()


@MODES
async def test_the_same_prompt_again_computes_its_last_token(replay: int) -> None:
    rig = Rig(replay_tokens=replay, spare=0)
    for length in (1, 2, 7, 8, 9, 16, 17, 40):
        await run(rig, "cold", ids(length, [length]))
        done = await run(rig, "warm", ids(length, [length]))
        assert done.restored.start == length
    await rig.close()


async def test_the_next_turn_waits_for_what_it_goes_on_from_and_for_nothing_else() -> None:
    """The same beginning is no reason to wait, and nobody waits for long."""
    rig = Rig(replay_tokens=0, deadline_s=5.0)
    rig.engine.before = lambda name: 0.05 if name == "read_pages" else 0.0
    turn = make_turn("a", ids(40))
    restored = await rig.begin(turn)
    reply = await rig.compute(turn, restored.start)
    await rig.end(turn)
    other, following = make_turn("b", ids(20, [1])), make_turn("c", (*ids(40), *reply, 1))
    assert await rig.sessions.admit(other) is not None
    assert rig.sessions.counters()["copies"] > 0
    assert await rig.sessions.admit(following) is not None
    assert rig.sessions.counters()["copies"] == 0
    assert rig.sessions._held["c"].choice.start == 47
    for name in "bc":
        rig.sessions.release(name)
    await rig.close()


async def test_a_turn_is_expected_until_what_it_leaves_behind_is_kept() -> None:
    """From the moment it is let in, without a gap; and no longer where nothing comes of it."""
    rig = Rig(replay_tokens=0)
    shelf = Shelf(rig.arena, 100)
    rig.engine.before = lambda name: 0.02 if name.startswith("read") else 0.0
    turn = make_turn("a", ids(40))
    coming = describe_coming(await rig.sessions.trace(turn))
    restored = await rig.begin(turn)
    assert coming in shelf._held
    await rig.compute(turn, restored.start)
    await rig.end(turn)
    while rig.sessions.counters()["copies"]:
        assert coming in shelf._held
        await rig.sessions.kept.wait()
        await asyncio.sleep(0)
    kept = len(rig.arena.points())
    assert coming not in shelf._held and len(shelf) == kept > 1
    await rig.begin(make_turn("b", ids(30)))
    assert len(shelf) == kept + 1
    rig.engine.detach("b")
    rig.sessions.release("b")
    assert len(shelf) == kept
    await rig.close()


@MODES
async def test_a_turn_begins_where_it_is_told_to(replay: int) -> None:
    """So that it can be run again from what it began with, whatever is kept since."""
    rig = Rig(replay_tokens=replay)
    first = await run(rig, "a", ids(40))
    again = await run(rig, "b", (*first.conversation, 1))
    assert again.restored.start == 47
    await run(rig, "c", (*again.conversation, 2))
    for limit in (47, 0, 39, 41):
        turn = make_turn("d", (*again.conversation, 2))
        assert await rig.sessions.admit(turn, limit=limit) is not None
        length = rig.sessions._held["d"].choice.start
        assert length <= limit
        assert length == limit or limit == 41
        rig.sessions.release("d")
    await rig.close()


async def test_turns_at_the_same_time_share_pages() -> None:
    rig, prompt = Rig(replay_tokens=8, pages=16), ids(50)
    first = await run(rig, "a", prompt)
    turns = [make_turn(name, (*first.conversation, number)) for number, name in enumerate("bc")]
    starts = [(await rig.begin(turn)).start for turn in turns]
    assert starts == [57, 57]
    assert rig.sessions.pool.held == 7 + 2 + 2, "seven shared pages, and two of each turn's own"
    for turn in turns:
        assert await rig.compute(turn, 57) == rig.engine.cold_tokens(turn)
        await rig.end(turn)
    await rig.settle()
    await rig.close()


async def test_pages_of_a_prompt_are_shared_while_it_prefills() -> None:
    rig, prompt = Rig(replay_tokens=8), ids(60)
    first, second = make_turn("a", prompt), make_turn("b", prompt)
    start = (await rig.begin(first)).start
    [result] = await rig.engine.step(rig.plan(first, start, 50))
    rig.sessions.advance("a", result.prefilled)
    restored = await rig.begin(second)
    assert restored == Restored(start=40, device_tokens=40), "six whole pages but for a window"
    assert await rig.compute(second, 40) == rig.engine.cold_tokens(second)
    assert await rig.compute(first, 50) == rig.engine.cold_tokens(first)
    for turn in (first, second):
        await rig.end(turn)
    await rig.settle()
    await rig.close()


@MODES
async def test_tenants_share_nothing(replay: int) -> None:
    rig = Rig(replay_tokens=replay)
    starts = [(await run(rig, name, ids(40), salt=name)).restored.start for name in ("a", "b", "a")]
    assert starts == [0, 0, 39]
    await rig.close()


@MODES
async def test_eviction_and_return(replay: int) -> None:
    rig = Rig(replay_tokens=replay, blocks=20, pages=16)
    assert (await run(rig, "a", ids(40))).restored.start == 0
    assert (await run(rig, "b", ids(40))).restored.start == 39
    for number in range(5):
        await run(rig, str(number), ids(60, [number])[::-1])
    assert rig.count("evictions_total") > 0
    assert (await run(rig, "c", ids(40))).restored.start == 0
    assert (await run(rig, "d", ids(40))).restored.start == 39
    assert rig.count("bytes") <= 20 * rig.engine.layout.page_bytes
    await rig.close()


async def test_a_budget_of_nothing_keeps_nothing_but_pages_on_the_device() -> None:
    for replay, start in ((0, 0), (8, 32)):
        rig = Rig(replay_tokens=replay, blocks=0)
        await run(rig, "a", ids(41))
        assert (await run(rig, "b", ids(41))).restored == Restored(start=start, device_tokens=start)
        assert rig.count('commits_total{result="refused"}') > 0
        await rig.close()


async def test_a_turn_that_can_never_fit_is_refused_with_the_numbers_and_one_that_does_not_now_waits() -> None:
    rig = Rig(pages=8, max_drafts=3)
    with pytest.raises(ContextTooLong, match=r"64 tokens.*72: 50 in the prompt, 12 for the answer, in pages of 8"):
        await rig.sessions.admit(make_turn("a", ids(50), max_tokens=12))
    first = make_turn("b", ids(20), max_tokens=9)
    assert (await rig.begin(first)).start == 0
    assert await rig.sessions.admit(make_turn("c", ids(30))) is None
    assert rig.sessions.counters()["pages_held"] == 4
    ids_ = await rig.compute(first, 0)
    assert ids_ == rig.engine.cold_tokens(first)
    rooms: list[int] = []
    rig.sessions.on_room = lambda: rooms.append(rig.sessions.pool.room)
    await rig.end(first)
    await rig.settle()
    assert rooms[-1] == 8, "it is told when the copy is made and the pages are free"
    await run(rig, "c", ids(30))
    await rig.close()


@MODES
async def test_a_cancelled_prefill_is_taken_up_by_the_retry(replay: int) -> None:
    rig, prompt = Rig(replay_tokens=replay), ids(90)
    turn = make_turn("a", prompt)
    await rig.begin(turn)
    for start in (0, 30):
        await rig.engine.step(rig.plan(turn, start, start + 30))
        rig.sessions.advance("a", start + 30)
    await rig.end(turn)
    await rig.settle()
    done = await run(rig, "b", prompt)
    assert done.restored.start == (60 if not replay else 56 - replay)
    await rig.close()


@MODES
async def test_a_turn_that_left_while_it_was_restored_leaves_nothing(replay: int) -> None:
    rig = Rig(replay_tokens=replay)
    await run(rig, "a", ids(40))
    rig.sessions.pool.forget_all()
    for slow in ("write_pages", "resume"):
        turn = make_turn("b", ids(41))
        rig.engine.before = lambda name, slow=slow: 0.02 if name == slow else 0.0  # type: ignore[misc]
        pages = await rig.sessions.admit(turn)
        assert pages is not None
        rig.engine.attach(turn, pages)
        restore = asyncio.create_task(rig.sessions.restore(turn))
        await asyncio.sleep(0.01)
        restore.cancel()
        await asyncio.gather(restore, return_exceptions=True)
        rig.engine.detach("b")
        rig.sessions.release("b")
        if slow == "write_pages":
            assert rig.sessions.counters()["leases"] == 1, "what is still being read stays"
        await rig.engine.read_pages([], [])
        rig.check_idle()
    assert (await run(rig, "c", ids(41))).restored.start > 20
    await rig.close()


async def test_a_turn_that_left_while_it_was_admitted_leaves_nothing() -> None:
    rig = Rig()
    admit = asyncio.create_task(rig.sessions.admit(make_turn("a", ids(40))))
    await asyncio.sleep(0)
    admit.cancel()
    await asyncio.gather(admit, return_exceptions=True)
    rig.sessions.release("a")
    rig.check_idle()
    await rig.close()


@MODES
@pytest.mark.parametrize("method", ["write_pages", "resume"])
@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_what_cannot_be_taken_over_is_withdrawn_and_the_turn_goes_on(
    replay: int, method: str, fault: str
) -> None:
    """What only comes late is not: whatever held the engine up says nothing about it."""
    rig = Rig(replay_tokens=replay, deadline_s=0.2)
    await run(rig, "a", ids(20))
    rig.sessions.pool.forget_all()
    faults = [1]

    def before(name: str) -> float:
        if name != method or not faults:
            return 0.0
        faults.pop()
        if fault == "hangs":
            return 0.5
        raise CheckpointError("no")

    rig.engine.before = before
    turn = make_turn("b", ids(20))
    done = await rig.run(turn)
    assert done.ids == rig.engine.cold_tokens(turn)
    assert not faults
    assert rig.count("withdrawn_total") == (fault == "raises")
    assert fault == "raises" or done.restored.start == 19, "it is tried again while the engine still hangs"
    assert rig.count(f'lookups_total{{result="{"failed" if fault == "raises" else "late"}"}}') >= 1
    await rig.engine.read_pages([], [])
    assert (await run(rig, "c", ids(20))).restored.start == 19
    await rig.close()


async def test_where_others_use_its_pages_a_turn_begins_again() -> None:
    """It may not compute anew in pages that others read."""
    rig = Rig(replay_tokens=0)
    prompt = ids(40)
    await run(rig, "a", prompt)
    other = make_turn("b", (*prompt, 1))
    await rig.begin(other)
    turn = make_turn("c", (*prompt, 2))
    pages = await rig.sessions.admit(turn)
    assert pages is not None
    rig.engine.attach(turn, pages)
    for point in list(rig.arena._points):
        rig.arena.blocks.view(point.blocks[0])[0] ^= 1
    assert await rig.sessions.restore(turn) is None
    rig.engine.detach("c")
    rig.sessions.release("c")
    assert (await rig.begin(turn)).start == 0
    assert rig.count("checksum_failures_total") >= 2
    assert await rig.compute(other, 40) == rig.engine.cold_tokens(other)
    assert await rig.compute(turn, 0) == rig.engine.cold_tokens(turn)
    for both in (other, turn):
        await rig.end(both)
    await rig.settle()
    await rig.close()


async def test_pages_that_cannot_be_gone_on_from_are_not_tried_for_ever() -> None:
    """Also where others use them, so that the turn has to be admitted again."""
    rig = Rig(replay_tokens=8, blocks=0)
    await run(rig, "a", ids(40))
    other, turn = make_turn("b", ids(40, [1])), make_turn("c", ids(40, [2]))
    assert (await rig.begin(other)).start == 32

    def before(name: str) -> float:
        if name == "resume":
            raise CheckpointError("no")
        return 0.0

    rig.engine.before = before
    async with asyncio.timeout(5):
        assert (await rig.begin(turn)).start == 0
    assert await rig.compute(other, 32) == rig.engine.cold_tokens(other)
    assert await rig.compute(turn, 0) == rig.engine.cold_tokens(turn)
    for both in (other, turn):
        await rig.end(both)
    await rig.settle()
    await rig.close()


async def test_where_nobody_uses_its_pages_a_turn_takes_them_for_itself() -> None:
    rig = Rig(replay_tokens=0)
    await run(rig, "a", ids(40))
    for point in list(rig.arena._points):
        rig.arena.blocks.view(point.blocks[0])[0] ^= 1
    assert (await run(rig, "c", ids(40))).restored.start == 0
    await rig.close()


@pytest.mark.parametrize("method", ["read_state", "read_pages"])
@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_what_cannot_be_copied_out_is_not_kept(method: str, fault: str) -> None:
    rig = Rig(deadline_s=0.02)

    def before(name: str) -> float:
        if name == method and fault == "raises":
            raise EngineFailed("no")
        return 0.06 if name == method else 0.0

    rig.engine.before = before
    await run_unchecked(rig, "a", ids(20))
    assert rig.count("entries") == 0
    assert rig.count(f'commits_total{{result="{"failed" if fault == "raises" else "late"}"}}') > 0
    rig.engine.before = lambda name: 0.0
    await rig.engine.read_pages([], [])
    await asyncio.sleep(0)
    await run(rig, "b", ids(20))
    await rig.close()


async def run_unchecked(rig: Rig, name: str, prompt: Sequence[int]) -> None:
    """Run a turn behind which something may still be on its way."""
    turn = make_turn(name, prompt)
    restored = await rig.begin(turn)
    assert await rig.compute(turn, restored.start) == rig.engine.cold_tokens(turn)
    await rig.end(turn)
    await rig.settle()


def fail_third_step() -> Callable[[str], float]:
    """For `ToyEngine.before`: two steps run, the one after them raises."""
    steps = iter([0, 0, 1])

    def before(name: str) -> float:
        if name == "step" and next(steps):
            raise EngineFailed("no")
        return 0.0

    return before


@MODES
async def test_what_a_failed_step_leaves_is_not_kept(replay: int) -> None:
    """Nor is what the turn took over, if it had no token yet, or what it made of that."""
    rig = Rig(replay_tokens=replay)
    await run(rig, "a", ids(30))
    entries = rig.arena.counters()["entries"]
    rig.engine.before = fail_third_step()
    with pytest.raises(EngineFailed):
        await rig.run(make_turn("b", ids(80)))
    await rig.settle()
    rig.engine.before = lambda name: 0.0
    rig.check_idle()
    assert rig.count("withdrawn_total") == 1
    assert rig.arena.counters()["entries"] == entries - 1
    assert rig.sessions.counters()["pages_cached"] <= 1, "pages that it shared or made are found no more"
    await run(rig, "c", ids(80))
    await rig.close()


async def test_a_step_that_fails_late_spares_what_was_trusted() -> None:
    rig = Rig()
    await run(rig, "a", ids(30))
    rig.engine.before = fail_third_step()
    with pytest.raises(EngineFailed):
        await rig.run(make_turn("b", ids(31)))
    await rig.settle()
    assert rig.count("withdrawn_total") == 0
    rig.engine.before = lambda name: 0.0
    assert (await run(rig, "c", ids(31))).restored.start >= 29
    await rig.close()


@MODES
async def test_flush_drops_everything(replay: int) -> None:
    rig = Rig(replay_tokens=replay)
    await run(rig, "a", ids(40))
    entries = rig.arena.counters()["entries"]
    assert rig.sessions.flush() == entries > 0
    assert (await run(rig, "b", ids(40))).restored.start == 0
    turn = make_turn("c", ids(40))
    restored = await rig.begin(turn)
    rig.sessions.flush()
    check_books(rig.sessions)
    assert await rig.compute(turn, restored.start) == rig.engine.cold_tokens(turn)
    await rig.end(turn)
    await rig.settle()
    await rig.close()


@MODES
async def test_what_is_put_aside_is_kept_until_the_turn_goes_on(replay: int) -> None:
    """Through floods and flushes; then it is like all else. A turn that does not come again gives it up."""
    rig = Rig(replay_tokens=replay, blocks=20)
    for end in ("goes on", "leaves"):
        turn = make_turn(f"a {end}", ids(20), max_tokens=30)
        said = await rig.compute(turn, (await rig.begin(turn)).start)
        assert await rig.sessions.put_aside(turn, 49, None)
        rig.engine.detach(turn.id)
        rig.sessions.release(turn.id)
        for number in range(4):
            await rig.run(make_turn(f"{end} {number}", ids(40, [number])))
        assert rig.arena.evicted > 0
        rig.sessions.flush()
        assert rig.sessions.counters()["leases"] == 1 == rig.sessions.counters()["entries"]
        following = make_turn(turn.id, (*ids(20), *said))
        if end == "leaves":
            rig.sessions.give_up(turn.id)
            rig.sessions.flush()
        assert (await rig.run(following)).restored.start == (49 if end == "goes on" else 0)
        rig.check_idle()
        rig.sessions.flush()
    await rig.close()


async def test_what_has_no_room_is_not_put_aside() -> None:
    rig, turn = Rig(replay_tokens=8, blocks=3), make_turn("a", ids(20), max_tokens=30)
    await rig.compute(turn, (await rig.begin(turn)).start)
    assert not rig.sessions.can_keep("a", 49)
    assert not await rig.sessions.put_aside(turn, 49, None)
    await rig.end(turn)
    await rig.settle()
    await rig.close()


@MODES
async def test_flush_drops_what_is_on_its_way(replay: int) -> None:
    rig = Rig(replay_tokens=replay)
    turn = make_turn("a", ids(40))
    restored = await rig.begin(turn)
    await rig.compute(turn, restored.start)
    await rig.end(turn)
    assert rig.sessions.counters()["copies"]
    rig.sessions.flush()
    await rig.settle()
    assert rig.arena.counters()["entries"] == rig.arena.counters()["bytes"] == 0
    assert (await run(rig, "b", ids(40))).restored.start == 0
    await rig.close()


@MODES
async def test_long_prompts_are_copied_in_slices(monkeypatch: pytest.MonkeyPatch, replay: int) -> None:
    """Neither a copy out nor one in keeps the engine for long; what is kept is one commit point."""
    for module in (keeper, loader):
        monkeypatch.setattr(module, "SLICE", 3)
    rig, sizes = Rig(replay_tokens=replay), list[int]()
    read, write = rig.engine.read_pages, rig.engine.write_pages
    rig.engine.read_pages = lambda pages, into: (sizes.append(len(pages)), read(pages, into))[1]  # type: ignore
    rig.engine.write_pages = lambda pages, rows: (sizes.append(len(pages)), write(pages, rows))[1]  # type: ignore
    first = await run(rig, "a", ids(130), chunk=130)
    assert rig.arena.counters()["entries"] == 2, "the ends of the prompt and of the turn"
    assert sum(sizes) == 17 + 2, "sixteen whole pages once, a begun one for each"
    rig.sessions.pool.forget_all()
    done = await run(rig, "b", (*first.conversation, 1))
    assert done.restored == Restored(start=137, host_tokens=137)
    assert max(sizes) <= 4, "three, and a begun one"
    await rig.close()


async def test_what_has_no_room_as_a_whole_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SLICE", 2)
    rig = Rig(blocks=12)
    await run(rig, "a", ids(40))
    entries = rig.arena.counters()["entries"]
    await run(rig, "b", ids(130)[::-1], chunk=130)
    assert rig.count('commits_total{result="refused"}') == 2
    assert rig.arena.counters()["entries"] == entries
    await rig.close()


@MODES
@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_arrivals_cancels_and_faults_leaves_nothing(replay: int, seed: int) -> None:
    """Clients with conversations of few beginnings over small stores; some leave, some calls fail or hang."""
    rng = random.Random(1000 * replay + seed)
    rig = Rig(replay_tokens=replay, blocks=30, pages=30, max_turns=4, stop_every=20, deadline_s=0.01)
    ends: Counter[str] = Counter()
    faults = {"write_pages": 0.1, "resume": 0.05, "read_state": 0.05, "read_pages": 0.05, "step": 0.03}
    places = asyncio.Semaphore(4)

    def before(name: str) -> float:
        if rng.random() < faults.get(name, 0.0):
            raise EngineFailed("no")
        return rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.002)) if rng.random() < 0.98 else 0.02

    async def attempt(turn: Turn) -> list[int]:
        """Take a turn through the engine, as a scheduler would."""
        while (pages := await rig.sessions.admit(turn)) is None:
            ends["waited"] += 1
            await asyncio.sleep(0.002)
        rig.engine.attach(turn, pages)
        try:
            restored = await rig.sessions.restore(turn)
            if restored is None:
                ends["again"] += 1
                return await leave(turn, again=True)
            assert restored.start == restored.device_tokens + restored.host_tokens
            ends["reused"] += restored.start > 0
            tokens = await rig.compute(turn, restored.start, drafts=rng.choice((0, 3)))
            await rig.end(turn)
            return tokens
        except EngineFailed:
            raise
        except BaseException:
            await leave(turn)
            raise

    async def leave(turn: Turn, again: bool = False) -> list[int]:
        while any(turn.id in names for names in rig.engine._under_way):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        rig.engine.detach(turn.id)
        rig.sessions.release(turn.id)
        return await attempt(turn) if again else []

    async def client(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        prompt = ids(rng.choice((5, 24, 47)), [rng.randrange(3)])
        for turn_number in range(rng.randint(1, 3)):
            turn = make_turn(f"{number}-{turn_number}", prompt, max_tokens=rng.randint(1, 12), salt=rng.choice("xy"))
            try:
                async with places, asyncio.timeout(rng.choice((0.003, 0.02, 5.0, 5.0))):
                    tokens = await attempt(turn)
            except TimeoutError:
                ends["left"] += 1
                continue
            except EngineFailed:
                ends["failed"] += 1
                continue
            assert tokens == rig.engine.cold_tokens(turn), turn.id
            ends["whole"] += 1
            prompt = (*prompt, *tokens, 7)[:180]

    rig.engine.before = before
    watch = asyncio.create_task(keep_checking(rig))
    await asyncio.gather(*(client(number) for number in range(40)))
    watch.cancel()
    rig.engine.before = lambda name: 0.0
    await rig.settle()
    await asyncio.sleep(0.02)
    await rig.engine.read_pages([], [])
    await asyncio.sleep(0)
    assert min(ends[end] for end in ("whole", "left", "reused")) > 0, ends
    await rig.close()


async def keep_checking(rig: Rig) -> None:
    """Look at the books all the time."""
    while True:
        check_books(rig.sessions)
        assert rig.engine.violations == []
        await asyncio.sleep(0.001)

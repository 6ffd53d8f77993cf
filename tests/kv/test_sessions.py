"""Session caches under the scheduler: what turns take over and leave behind, and that no failure reaches a turn."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsuf.engine_scripted import Rule, ScriptedEngine
from dsuf.errors import CheckpointError, EngineFailed
from dsuf.kv.arena import Arena
from dsuf.kv.sessions import Sessions
from dsuf.observe.metrics import Metrics
from dsuf.reference.arithmetic import I64
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model
from dsuf.reference.speculate import HeadDrafter
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Engine, Prompt, SessionCache, StepResult, Turn, Usage
from tests.sched.rig import encode, make_engine, make_turn, read, until

LONG = "".join(chr(200 + i) for i in range(100))


class Rig:
    """A scheduler with session caches over an engine."""

    def __init__(self, engine: Engine, budget_bytes: int = 1 << 20, **limits: Any) -> None:
        self.metrics = Metrics("test")
        self.arena = Arena(budget_bytes)
        self.sessions = Sessions(engine, self.arena, self.metrics, deadline_s=0.5)
        self.scheduler = Scheduler(engine, Limits(**({"chunk_tokens": 16} | limits)), self.metrics, self.sessions)

    async def run(self, turn: Turn) -> tuple[Usage, list[int]]:
        """Usage of the prompt and tokens of a turn; it is over and left behind what it does when this returns."""
        results = await read(self.scheduler.submit(turn))
        await self.settle()
        return tell(results, turn), [token for result in results for token in result.ids]

    async def settle(self) -> None:
        """Wait until nothing is held or sealed."""
        await until(lambda: not self.scheduler.counters()["attached"] and not self.sessions._sealing)

    def count(self, name: str) -> float:
        """A sample of the metrics, by its line's beginning."""
        lines = self.metrics.render().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"dsuf_session_cache_{name}"))

    def check_idle(self) -> None:
        """Nothing is in use."""
        counters = self.sessions.counters()
        assert {name: counters[name] for name in ("leases", "filling", "dying", "turns")} == dict.fromkeys(
            ("leases", "filling", "dying", "turns"), 0
        )


def tell(results: Sequence[StepResult], turn: Turn) -> Usage:
    """What the first result says of the prompt; only it says anything, and it adds up."""
    usage = results[0].usage or Usage(computed_tokens=len(turn.prompt.ids))
    assert all(result.usage is None for result in results[1:])
    assert usage.prompt_tokens == len(turn.prompt.ids)
    return usage


@contextlib.asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[Rig]:
    """A rig whose scheduler runs for the length of the block, and is idle at its end."""
    rig = Rig(engine, **options)
    loop = asyncio.create_task(rig.scheduler.run())
    try:
        yield rig
        await rig.settle()
        rig.check_idle()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await rig.sessions.close()
    assert set(rig.sessions.counters().values()) == {0}


def salted(turn: Turn, salt: str) -> Turn:
    return msgspec.structs.replace(turn, prompt=msgspec.structs.replace(turn.prompt, salt=salt))


async def test_the_next_turn_takes_over_prompt_and_reply() -> None:
    async with serving(make_engine(Rule(reply="an answer"))) as rig:
        first, _ = await rig.run(make_turn("1", LONG))
        second, _ = await rig.run(make_turn("2", LONG + "an answer" + "and more"))
        third, _ = await rig.run(make_turn("3", LONG + "an answer" + "and more" + "an answer" + "!"))
    assert first == Usage(computed_tokens=100)
    assert second == Usage(host_tokens=108, computed_tokens=9)
    assert third == Usage(host_tokens=125, computed_tokens=2)
    assert rig.count('lookups_total{result="hit"}') == 2
    assert rig.count("hit_tokens_total") == 233


async def test_a_shared_beginning_is_taken_over_as_far_as_a_commit_point_goes() -> None:
    async with serving(make_engine(Rule(reply="x"))) as rig:
        await rig.run(make_turn("1", LONG))
        reused = [(await rig.run(make_turn(str(n), LONG[:n] + "other" * 20)))[0].host_tokens for n in (15, 40, 75, 99)]
    assert reused == [15, 40, 75, 99]  # commit points at 16, 32, 48, 80, 96, 100, each can spare 16


async def test_tenants_share_nothing() -> None:
    async with serving(make_engine(Rule(reply="x"))) as rig:
        await rig.run(salted(make_turn("1", LONG), "a"))
        assert (await rig.run(salted(make_turn("2", LONG), "b")))[0].host_tokens == 0
        assert (await rig.run(salted(make_turn("3", LONG), "a")))[0].host_tokens == 99


async def test_a_cancelled_prefill_is_taken_up_by_the_retry() -> None:
    rules = (Rule(reply="x", turn=0, prefill_s_per_token=0.002), Rule(reply="x"))
    async with serving(make_engine(*rules)) as rig:
        ticket = rig.scheduler.submit(make_turn("1", LONG))
        await until(lambda: ticket.prefilled_tokens >= 64)
        ticket.cancel()
        await rig.settle()
        usage, ids = await rig.run(make_turn("2", LONG))
    assert usage.host_tokens >= 64
    assert ids == [ord("x")]


async def test_a_turn_that_left_while_it_was_restored_leaves_nothing() -> None:
    engine = make_faulty(Rule(reply="x"))
    async with serving(engine) as rig:
        await rig.run(make_turn("1", LONG))
        engine.hangs = 1
        ticket = rig.scheduler.submit(make_turn("2", LONG + "!"))
        await until(lambda: not engine.hangs)
        assert rig.sessions.counters()["leases"] == 1
        ticket.cancel()
        await rig.settle()
    assert set(engine.counters().values()) == {0}


async def test_eviction_and_return() -> None:
    other = "".join(chr(500 + i) for i in range(100))
    async with serving(make_engine(Rule(reply="x")), budget_bytes=16_000) as rig:
        await rig.run(make_turn("1", LONG))
        assert (await rig.run(make_turn("2", LONG)))[0].host_tokens == 99
        for n in range(3):
            await rig.run(make_turn(f"other {n}", other + str(n) * 60))
        assert rig.count("evictions_total") > 0
        assert (await rig.run(make_turn("3", LONG)))[0].host_tokens == 0
        assert (await rig.run(make_turn("4", LONG)))[0].host_tokens == 99
        assert rig.count("bytes") <= 16_000


async def test_a_budget_that_fits_nothing_keeps_nothing() -> None:
    async with serving(make_engine(Rule(reply="x")), budget_bytes=100) as rig:
        await rig.run(make_turn("1", LONG))
        assert (await rig.run(make_turn("2", LONG)))[0].host_tokens == 0
        assert rig.count('commits_total{result="refused"}') > 0


class Faulty(ScriptedEngine):
    """Refuses to export or import, or takes too long, as often as told."""

    imports, exports, hangs = 0, 0, 0

    async def import_session(self, turn: str, cache: SessionCache, length: int) -> None:
        if self.imports:
            self.imports -= 1
            raise CheckpointError("no")
        if self.hangs:
            self.hangs -= 1
            await asyncio.sleep(60)
        await super().import_session(turn, cache, length)

    async def export_session(self, turn: str) -> SessionCache:
        if self.exports:
            self.exports -= 1
            raise EngineFailed("no")
        return await super().export_session(turn)


def make_faulty(*rules: Rule) -> Faulty:
    engine = make_engine(*rules)
    engine.__class__ = Faulty
    assert isinstance(engine, Faulty)
    return engine


@pytest.mark.parametrize("fault", ["imports", "hangs"])
async def test_what_cannot_be_taken_over_is_withdrawn_and_the_turn_goes_on(fault: str) -> None:
    """Pitfall 13: an entry whose use failed is not tried again."""
    engine = make_faulty(Rule(reply="x"))
    async with serving(engine) as rig:
        await rig.run(make_turn("1", LONG[:16]))
        setattr(engine, fault, 1)
        usage, ids = await rig.run(make_turn("2", LONG[:16] + "!"))
        assert (usage.host_tokens, ids) == (0, [ord("x")])
        assert rig.count("withdrawn_total") == 1
        assert rig.count('lookups_total{result="failed"}') == 1
        assert (await rig.run(make_turn("3", LONG[:16] + "!")))[0].host_tokens == 16


async def test_what_cannot_be_copied_out_is_not_kept() -> None:
    engine = make_faulty(Rule(reply="x"))
    engine.exports = 100
    async with serving(engine) as rig:
        assert (await rig.run(make_turn("1", LONG)))[1] == [ord("x")]
        assert rig.count("entries") == 0
        assert rig.count('commits_total{result="failed"}') > 0


async def test_an_entry_behind_which_a_step_fails_is_withdrawn() -> None:
    """Pitfall 13: the retry does not load it again, and what the failed turn computed is not kept."""
    rules = (Rule(reply="x", turn=1, fail_at_step=0), Rule(reply="x"))
    async with serving(make_engine(*rules)) as rig:
        await rig.run(make_turn("1", LONG[:16]))
        entries = rig.count("entries")
        with pytest.raises(EngineFailed):
            await rig.run(make_turn("2", LONG[:16] + "!"))
        await rig.settle()
        assert rig.count("withdrawn_total") == 1
        assert rig.count("entries") == entries - 1
        assert (await rig.run(make_turn("3", LONG[:16] + "!")))[1] == [ord("x")]


async def test_a_turn_that_left_before_its_step_failed_is_not_kept() -> None:
    engine = make_engine(Rule(reply="x", prefill_s_per_token=0.002, hang_at_step=4, hang_s=0.05))
    async with serving(engine) as rig:
        ticket = rig.scheduler.submit(make_turn("1", LONG))
        await until(lambda: ticket.prefilled_tokens == 64 and rig.scheduler.counters()["running"] == 1)
        engine._turns["1"].prefilled = 65  # the step in flight raises when it comes to compute
        ticket.cancel()
        await rig.settle()
        lengths = {entry.cache.length for entry in rig.arena._entries}
        assert lengths == {16, 32, 48}
        assert rig.scheduler.trouble is None


async def test_flush_drops_everything() -> None:
    async with serving(make_engine(Rule(reply="x"))) as rig:
        await rig.run(make_turn("1", LONG))
        assert rig.sessions.flush() == 6
        assert (await rig.run(make_turn("2", LONG)))[0].host_tokens == 0


def flip(cache: SessionCache, name: str) -> SessionCache:
    """`cache` with one bit changed in the part `name`."""
    damaged = bytearray(cache.ids if name == "ids" else cache.parts[name])
    damaged[len(damaged) // 2] ^= 16
    if name == "ids":
        return msgspec.structs.replace(cache, ids=bytes(damaged))
    return msgspec.structs.replace(cache, parts={**cache.parts, name: bytes(damaged)})


async def test_one_flipped_bit_in_any_part_is_a_miss(model: Model, ids: I64) -> None:
    engine = ReferenceEngine(model, "reference", "test", context_tokens=400, max_turns=3, prefill="exact")
    prompt = Prompt(ids=tuple(ids[:40].tolist()))

    def make(name: str) -> Turn:
        return msgspec.structs.replace(make_turn(name, max_tokens=3), prompt=prompt)

    async with serving(engine, chunk_tokens=40) as rig:
        _, expected = await rig.run(make("cold"))
        assert await rig.run(make("warm")) == (Usage(host_tokens=39, computed_tokens=1), expected)
        names = ["ids", *next(iter(rig.arena._entries)).cache.parts]
        for number, name in enumerate(names, 1):
            for entry in rig.arena._entries:
                entry.cache = flip(entry.cache, name)
            usage, tokens = await rig.run(make(name))
            assert (usage.host_tokens, tokens) == (0, expected), name
            assert rig.count("checksum_failures_total") == number
            assert rig.count("withdrawn_total") == number
            rig.sessions.flush()
            assert (await rig.run(make("again")))[1] == expected
    await engine.close()


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.full), 3])
async def test_conversations_at_once_are_as_cold_whatever_is_evicted(
    model: Model, small_checkpoint: Path, ids: I64, drafts: int
) -> None:
    """Exact mode: every turn gets the tokens that it gets alone, with a budget for a few of the commit points."""
    head = HeadDrafter(load_draft(small_checkpoint, model)) if drafts else None
    engine = ReferenceEngine(
        model, "reference", "test", context_tokens=400, max_turns=3, prefill="exact", drafter=head
    )  # fmt: skip

    def make(name: str, tokens: list[int]) -> Turn:
        return msgspec.structs.replace(make_turn(name, max_tokens=6), prompt=Prompt(ids=tuple(tokens)))

    async def converse(rig: Rig, number: int) -> list[tuple[list[int], list[int]]]:
        prompt, turns = ids[:30].tolist() + ids[40 + number : 50 + number].tolist(), []
        for turn in range(3):
            results = await read(rig.scheduler.submit(make(f"{number}-{turn}", prompt)))
            reused.append(tell(results, make("", prompt)).host_tokens)
            reply = [token for result in results for token in result.ids]
            turns.append((prompt, reply))
            prompt = prompt + reply + ids[60 + turn : 67 + turn].tolist()
        return turns

    reused: list[int] = []
    async with serving(engine, budget_bytes=700_000, chunk_tokens=10, drafts=drafts) as rig:
        told = await asyncio.gather(*(converse(rig, number) for number in range(4)))
        assert rig.count("evictions_total") > 0
    assert sum(reused) > 100
    async with serving(engine, budget_bytes=0, chunk_tokens=200) as rig:
        for number, (prompt, reply) in enumerate(turn for turns in told for turn in turns):
            assert (await rig.run(make(str(number), prompt)))[1] == reply
    await engine.close()


@pytest.mark.parametrize("seed", range(6))
async def test_any_order_of_arrivals_cancels_and_faults_leaves_nothing(seed: int) -> None:
    """Turns over few prompts, with a small budget; some are cancelled, some steps, imports and exports fail."""
    rng = random.Random(seed)
    rules = (
        Rule(reply="abc", match="F", fail_at_step=1), Rule(reply="defghi", step_s=0.0005, prefill_s_per_token=1e-5)
    )  # fmt: skip
    engine = make_faulty(*rules)
    ends: Counter[str] = Counter()

    async def client(rig: Rig, number: int) -> None:
        await asyncio.sleep(rng.random() * 0.2)
        prompt = LONG[: rng.choice((16, 40, 99))] + rng.choice(("", "x", "yy" * 30, "F"))
        engine.imports, engine.exports = rng.random() < 0.1, rng.random() < 0.1
        ticket = rig.scheduler.submit(salted(make_turn(str(number), prompt), rng.choice(("", "s"))))
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.005, 5.0, 5.0))):
                results = await read(ticket)
            tell(results, ticket.turn)
            assert [token for result in results for token in result.ids] == encode("defghi")
            ends["whole"] += 1
        except TimeoutError:
            ticket.cancel()
            ends["cancelled"] += 1
        except EngineFailed:
            ends["failed"] += 1

    async with serving(engine, budget_bytes=12_000, failing_steps=1000) as rig:
        await asyncio.gather(*(client(rig, number) for number in range(60)))
        await rig.settle()
        assert rig.count("hit_tokens_total") > 0
    assert ends.total() == 60
    assert min(ends[end] for end in ("whole", "cancelled", "failed")) > 0
    assert set(engine.counters().values()) == {0}

"""Two nodes in one process: one computes prompts, the other answers; tokens as from one node, whatever fails."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from dsuf.errors import Unavailable
from dsuf.kv.giver import LocalGiver
from dsuf.kv.handoff import Offer, Piece
from dsuf.kv.taker import Taker
from dsuf.kv.trace import Trace
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Turn
from tests.sched.rig import IDLE, make_scheduler, read, until
from tests.sched.test_over_pages import count, ids
from tests.toy import ToyEngine, make_turn


class Watched(LocalGiver):
    """Counts offers while the prompt is still computed; `fault` may raise or wait in any call."""

    early = 0
    fault: Callable[[str], float] = staticmethod(lambda call: 0.0)

    async def offer(
        self, turn: Turn, pages: int, compute: bool = True, trace: Trace | None = None, patience_s: float = 0.5
    ) -> Offer | None:  # fmt: skip
        await asyncio.sleep(self.fault("offer"))
        offer = await super().offer(turn, pages, compute)
        self.early += offer is not None and offer.point is None
        return offer

    async def read(self, offer: Offer, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
        await asyncio.sleep(self.fault("read"))
        await super().read(offer, pieces, into)

    async def release(self, offer: Offer) -> bool:
        await asyncio.sleep(self.fault("release"))
        return await super().release(offer)


class Pair:
    """The two nodes. What is asked of the other one may take `deadline_s`."""

    def __init__(self, *, deadline_s: float = 5.0, **engine: Any) -> None:
        self.far_engine, self.near_engine = ToyEngine(**engine), ToyEngine(**engine)
        self.far = make_scheduler(self.far_engine, chunk_tokens=16, role="prefill")
        self.giver = Watched(self.far._sessions, self.far.prepare, lease_s=2.0)
        near = make_scheduler(self.near_engine)
        taker = Taker(near._sessions, self.giver, near._metrics, deadline_s=deadline_s)
        limits = Limits(chunk_tokens=16, role="decode")
        self.near = Scheduler(self.near_engine, limits, near._metrics, near._sessions, taker)

    async def ask(self, turn: Turn) -> tuple[list[int], int]:
        """The tokens of `turn`, and how many of its prompt came from the other node."""
        results = await read(self.near.submit(turn))
        usage = results[0].usage
        assert usage is None or usage.prompt_tokens == len(turn.prompt.ids)
        return [token for result in results for token in result.ids], usage.peer_tokens if usage else 0


def is_idle(scheduler: Scheduler) -> bool:
    """Whether nothing of any turn is left."""
    counters = scheduler._sessions.counters()
    left = [counters[name] for name in ("turns", "copies", "pages_held", "leases")]
    return scheduler.counters() == IDLE and not any(left)


@asynccontextmanager
async def pairing(**engine: Any) -> AsyncIterator[Pair]:
    """Both nodes at work; afterwards nothing is left on either."""
    pair = Pair(**engine)
    loops = [asyncio.create_task(scheduler.run()) for scheduler in (pair.far, pair.near)]
    try:
        yield pair
        for scheduler in (pair.far, pair.near):
            await until(partial(is_idle, scheduler))
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    for engine_used in (pair.far_engine, pair.near_engine):
        assert engine_used.violations == [] and set(engine_used.counters().values()) == {0}


@pytest.mark.parametrize("replay_tokens", [0, 8])
async def test_prompts_come_from_the_other_node_and_tokens_are_those_of_one(replay_tokens: int) -> None:
    async with pairing(replay_tokens=replay_tokens) as pair:
        pair.far_engine.step_s = lambda plan: 0.002
        turns = [make_turn(f"t{i}", ids(90 + i, i), max_tokens=12) for i in range(4)]
        answers = await asyncio.gather(*map(pair.ask, turns))
        for turn, (tokens, peer_tokens) in zip(turns, answers, strict=True):
            assert tokens == pair.near_engine.cold_tokens(turn)
            assert peer_tokens >= 80
        assert pair.giver.early > 0, "chunks are taken while prefill goes on"
        assert count(pair.near, "dsuf_session_cache_handoff_tokens") >= 320


async def test_the_node_for_prompts_answers_nobody() -> None:
    async with pairing() as pair:
        with pytest.raises(Unavailable, match="computes prompts for other nodes") as refused:
            pair.far.submit(make_turn("a", ids(9)))
        assert refused.value.retry_after_s == 10


async def test_a_short_prompt_is_computed_here() -> None:
    async with pairing() as pair:
        turn = make_turn("a", ids(8))
        assert await pair.ask(turn) == (pair.near_engine.cold_tokens(turn), 0)
        assert pair.far.steps == 0


@pytest.mark.parametrize("call", ["offer", "read", "release", "far step", "far admit"])
@pytest.mark.parametrize("how", ["raises", "hangs"])
@pytest.mark.parametrize("nth", [1, 2])
async def test_whatever_fails_the_prompt_is_computed_again(call: str, how: str, nth: int) -> None:
    async with pairing(deadline_s=0.2 if how == "hangs" else 5.0) as pair:
        calls = dict.fromkeys(("offer", "read", "release", "far step", "far admit"), 0)

        def fault(name: str) -> float:
            calls[name] += 1
            if name == call and calls[name] == nth:
                if how == "raises":
                    raise OSError("the wire is cut")
                return 0.5
            return 0.0

        pair.giver.fault = fault  # type: ignore[method-assign, assignment]
        pair.far_engine.before = lambda name: fault("far step") if name == "step" else 0.0
        admit = pair.far._sessions.admit

        async def faulty_admit(turn: Turn, *, peer_from: int | None = None) -> tuple[int, ...] | None:
            await asyncio.sleep(fault("far admit"))
            return await admit(turn, peer_from=peer_from)

        pair.far._sessions.admit = faulty_admit  # type: ignore[method-assign]
        turn = make_turn("t", ids(90), max_tokens=12)
        async with asyncio.timeout(20):
            tokens, _ = await pair.ask(turn)
        assert tokens == pair.near_engine.cold_tokens(turn)


async def test_a_client_that_leaves_while_its_prompt_comes_over() -> None:
    async with pairing() as pair:
        pair.far_engine.step_s = lambda plan: 0.05
        ticket = pair.near.submit(make_turn("t", ids(200)))
        await until(lambda: pair.far.counters()["attached"] == 1)
        assert pair.near.counters()["queued"] == 1
        ticket.cancel()
        await until(lambda: pair.near.counters() == IDLE)
        await until(lambda: pair.far.counters() == IDLE)

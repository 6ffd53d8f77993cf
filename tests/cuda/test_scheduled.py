"""The scheduler and the session caches over the CUDA engine on its toy machine: conversations at random, all replies
right, pages and places back at the end."""

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.sched.scheduler import Scheduler
from dsuf.types import SessionState
from tests.cuda.drive import RULE, ThirdMask, make_turn
from tests.cuda.host import make_host_machine
from tests.cuda.test_extras import say
from tests.sched.rig import serving

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
SETUP = Setup(context_tokens=700, max_turns=3, pages=20, prefill_rows=64)


async def talk(scheduler: Scheduler, chance: random.Random, turns: int) -> int:
    """A conversation whose every prompt goes on from the last reply; how many turns were heard to their end."""
    history = [chance.randrange(2, 500) for _ in range(chance.randrange(1, 200))]
    heard = 0
    for _ in range(turns):
        ruled, top = chance.random() < 0.4, chance.choice((None, 0, 3))
        turn = make_turn(history, chance.randrange(1, 12), RULE if ruled else None, logprobs=top)
        ticket, ids, leaves, rated = scheduler.submit(turn), list[int](), chance.random() < 0.2, 0
        async for result in ticket:
            ids += result.ids
            rated += len(result.logprobs)
            if leaves and len(ids) > 2:
                ticket.cancel()
                break
        expected = say(history, turn.sampling.max_tokens, ruled=ruled)
        assert rated == (0 if top is None else len(ids))
        assert ids == expected[: len(ids)] and (leaves or ids == expected)
        heard += ids == expected
        history = [*history, *ids, *[chance.randrange(2, 500) for _ in range(chance.randrange(1, 40))]]
        if len(history) > 600:
            break
    return heard


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("drafts", [0, 5])
async def test_conversations(mode: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More conversations than places and fewer pages than they want; some readers leave, some turns have a rule."""
    machine = make_host_machine(monkeypatch, CONFIG, SETUP)
    eos_id = CONFIG.eos_token_id
    engine = CudaEngine(
        machine, "weights", mode, captures=False, open_mask=lambda rule: ThirdMask(CONFIG.vocab_size, end=eos_id)
    )
    chance = random.Random(f"{mode} {drafts}")
    resumed: list[int] = []
    resume = engine.resume

    def note(turn: str, length: int, state: SessionState | None) -> Coroutine[Any, Any, int]:
        resumed.append(length)
        return resume(turn, length, state)

    monkeypatch.setattr(engine, "resume", note)
    async with serving(engine, blocks=300, chunk_tokens=50, queue_limit=64, drafts=drafts) as scheduler:
        talks = [talk(scheduler, random.Random(chance.random()), 4) for _ in range(8)]
        assert sum(await asyncio.gather(*talks)) >= 16
        assert max(resumed) > 128, "no turn went on from another's pages"
        async with asyncio.timeout(10):
            while any(engine.counters().values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await engine.close()
    driver = machine.device.driver  # type: ignore[attr-defined]
    assert not driver.alive and not driver.memory

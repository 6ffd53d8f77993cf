"""Session caches over the reference model: tokens and cache bytes of a turn that took over are those of a cold one."""

import asyncio

import numpy as np
import pytest

from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.giver import LocalGiver
from dsuf.kv.sessions import Restored, Sessions
from dsuf.kv.taker import Taker
from dsuf.observe.metrics import Metrics
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.model import Model, PrefillMode
from dsuf.types import PrefillRange, StepPlan, Turn
from tests.reference.conftest import model, small_checkpoint
from tests.reference.rig import decode, global_bytes, make_turn, prefill

__all__ = ["model", "small_checkpoint"]

PROMPT = np.random.default_rng(3).integers(3, 200, 300)


class Node:
    """A reference engine with its session caches, and turns through both."""

    def __init__(self, model: Model, mode: PrefillMode) -> None:
        self.engine = ReferenceEngine(model, "reference", "test", context_tokens=400, max_turns=3, prefill=mode)
        self.metrics = Metrics("test")
        arena = Arena(Blocks(self.engine.layout.page_bytes, map_memory(1 << 23)))
        self.sessions = Sessions(self.engine, arena, self.metrics)

    async def run(self, turn: Turn, peer_from: int | None = None) -> tuple[Restored, list[int], bytes]:
        """What `turn` took over, its tokens, and its cache at the end."""
        pages = await self.sessions.admit(turn, peer_from=peer_from)
        assert pages is not None
        self.engine.attach(turn, pages)
        restored = await self.sessions.restore(turn)
        assert restored is not None
        ids = prefill(self.engine, turn, restored.start, chunk=70)
        self.sessions.advance(turn.id, len(turn.prompt.ids))
        await self.sessions.commit(turn, len(turn.prompt.ids))
        ids += decode(self.engine, turn)
        await self.sessions.commit(turn, len(turn.prompt.ids) + len(ids))
        await self.sessions.settle()
        rows = global_bytes(self.engine, turn)
        self.leave(turn)
        return restored, ids, rows

    async def compute(self, turn: Turn) -> None:
        """Prefill for another node."""
        pages = await self.sessions.admit(turn)
        assert pages is not None
        self.engine.attach(turn, pages)
        length = len(turn.prompt.ids)
        for start in range(0, length, 70):
            stop = min(start + 70, length)
            await self.engine.step(StepPlan(prefill=(PrefillRange(turn.id, start, stop),)))
            self.sessions.advance(turn.id, stop)
            await (self.sessions.commit if stop == length else self.sessions.commit_pages)(turn, stop)
        self.leave(turn)

    def leave(self, turn: Turn) -> None:
        """Detach and release."""
        self.engine.detach(turn.id)
        self.sessions.release(turn.id)

    async def close(self) -> None:
        """Everything comes back."""
        await self.sessions.close()
        assert set(self.sessions.counters().values()) == {0}
        await self.engine.close()


@pytest.mark.parametrize("mode", ["exact", "replay"])
async def test_device_host_and_peer_give_what_a_cold_run_gives(model: Model, mode: PrefillMode) -> None:
    far, near = Node(model, mode), Node(model, mode)
    turn = make_turn("a", PROMPT, max_tokens=12)
    taker = Taker(near.sessions, LocalGiver(far.sessions, far.compute), near.metrics, deadline_s=20)
    assert await taker.take(turn) == 0
    peer = await near.run(turn, 0)
    device = await near.run(turn)
    near.sessions.pool.forget_all()
    host = await near.run(turn)
    near.sessions.flush()
    cold = await near.run(turn)
    assert [run[0] for run in (cold, peer, device, host)] == [
        Restored(), Restored(start=299, peer_tokens=299), Restored(start=299, device_tokens=256, host_tokens=43),
        Restored(start=299, host_tokens=299),
    ]  # fmt: skip
    assert cold[1:] == peer[1:] == device[1:] == host[1:]
    assert len(cold[1]) == 12
    await asyncio.sleep(0)
    await far.close()
    await near.close()


async def test_the_next_turns_of_a_conversation_are_as_cold(model: Model) -> None:
    node = Node(model, "exact")
    prompt, turns = PROMPT[:120], []
    for number in range(3):
        turn = make_turn(str(number), prompt, max_tokens=9)
        turns.append((turn, await node.run(turn)))
        prompt = np.concatenate([prompt, turns[-1][1][1], PROMPT[200 + number : 203 + number]])
    assert [run[0].start for _, run in turns] == [0, 128, 140]
    for turn, run in turns:
        node.sessions.flush()
        cold = await node.run(turn)
        assert cold[0].start == 0
        assert cold[1:] == run[1:]
    await node.close()


@pytest.mark.parametrize("part", ["page", "tail", "payload"])
async def test_a_flipped_bit_is_found(model: Model, part: str) -> None:
    node = Node(model, "exact")
    turn = make_turn("a", PROMPT[:200], max_tokens=5)
    _, expected, rows = await node.run(turn)
    node.sessions.pool.forget_all()
    blocks = set()
    for point in node.sessions.arena._points:
        assert point.page is not None
        assert point.tail is not None
        blocks.add({"page": point.page.block, "tail": point.tail, "payload": point.blocks[-1]}[part])
    for block in blocks:
        node.sessions.arena.blocks.view(block)[17] ^= 8
    restored, ids, again = await node.run(turn)
    assert (restored.start, ids, again) == (0, expected, rows)
    assert b"checksum_failures_total 0.0" not in node.metrics.render()
    await node.close()

"""Clients that leave, over real sockets: every way of closing, at every stage, in both modes."""

import asyncio
import logging
import random
import re
from pathlib import Path

import pytest

from dsuf.node.node import Node
from tests.node.rig import IDLE, Client, running, write_script
from tests.sched.rig import pass_steps, until

WAYS = ("fin", "half-close", "rst")
STAGES = ("queued", "prefilling", "decoding", "writing")
RULES = [
    {"match": "background", "reply": "tick " * 5000, "step_s": 0.002},
    {"match": "prefilling", "reply": "word " * 5000, "step_s": 0.002, "prefill_s_per_token": 0.0002},
    {"match": "writing", "reply": "word " * 30_000, "tokens_per_step": 4000},
    {"reply": "word " * 5000, "step_s": 0.002},
]


async def visit(node: Node, stage: str, way: str, chance: random.Random, *, stream: bool) -> None:
    """Ask, get as far as `stage`, and leave."""
    if stage == "queued":
        await asyncio.sleep(0.5)  # behind those who fill the engine
    client = await Client.connect(node, buffer_bytes=4096)
    if stage == "writing":
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    words = "long " * (2000 if stage == "prefilling" else 1)
    await client.ask(f"{stage} {words}", stream=stream, max_tokens=30_000)
    if stream and stage == "decoding":
        await client.read_until(b"word", 20)
    if stage == "writing":
        await until(lambda: bool(node.scheduler and node.scheduler.counters()["writing"]))  # for anybody
    await asyncio.sleep(chance.uniform(0.05, 0.3) + (0 if stage in ("queued", "decoding") else 1))
    {"fin": client.close, "half-close": client.half_close, "rst": client.reset}[way]()
    await asyncio.sleep(0.3)
    client.close()


def count_left(node: Node) -> dict[str, int]:
    """Clients that the server knows to have left, by stage."""
    found = re.findall(r'^dsuf_client_disconnects_total\{stage="(\w+)"\} (\d+)', node.metrics.render().decode(), re.M)
    return {stage: int(count) for stage, count in found}


async def test_pitfall_16_clients_that_leave_leave_nothing(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    chance, script = random.Random(3), write_script(tmp_path, RULES)
    async with running(model_dir, script, max_turns=49, prefill_chunk_tokens=64) as node:
        scheduler, engine = node.scheduler, node.engine
        assert scheduler is not None and engine is not None
        background = await Client.connect(node)
        await background.ask("background", max_tokens=10_000)
        # A whole reply that is being written is no turn any more.
        cases = [(STAGES[i % 4], WAYS[i // 4 % 3], i % 5 != 0 or STAGES[i % 4] == "writing") for i in range(64)]
        await asyncio.gather(*(visit(node, stage, way, chance, stream=stream) for stage, way, stream in cases))
        await until(lambda: sum(count_left(node).values()) == 64)  # the server has noticed: two steps from here
        await pass_steps(scheduler, 2)
        assert scheduler.counters() == IDLE | {"attached": 1, "running": 1}
        assert engine.counters()["turns"] == 1
        background.close()
        await until(lambda: scheduler.counters() == IDLE)
        await until(lambda: set(engine.counters().values()) == {0})
        await until(lambda: sum(count_left(node).values()) == 65)
        left = count_left(node)
    with capsys.disabled():
        print(f"\nclients that left, by stage: {left}")
    assert set(STAGES) <= set(left)
    assert caplog.records == []

"""The load generator from end to end: against a node with the scripted engine, and against one that sends it away."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from bench.conversation import Shape
from bench.serve import Load, Target, generate, tabulate
from dsuf.checkpoint.forms import RELEASED
from tests.node.rig import running, write_script

SHAPE = Shape(system_words=40, prompt_words=10, turns=3, max_tokens=8, tools_share=0.5)


async def test_sessions_against_a_node(tmp_path: Path) -> None:
    """Every turn is had, in both loops, and later ones find more of their prompt cached."""
    script = write_script(tmp_path, [{"reply": "one two three four", "step_s": 0.001}])
    closed = Load(shape=SHAPE, sessions=6, users=3, think_s=0.0)
    opened = Load(shape=SHAPE, sessions=5, rate=200.0, think_s=0.0, seed=1)
    async with running(RELEASED, script) as node:
        records = await generate(closed, Target(url=node.url))
        others = await generate(opened, Target(url=node.url))
    assert len(records) == 18 and len(others) == 15
    assert all(record.error is None for record in (*records, *others))
    assert sorted(record.turn for record in records) == sorted([0, 1, 2] * 6)
    assert all(sum(record.sources.values()) == record.prompt_tokens > 0 for record in records)
    assert all(len(record.arrivals_s) == record.completion_tokens > 0 for record in records)  # a token a step
    whole, first, later = tabulate(closed, records)
    assert (whole["requests"], first["requests"], later["requests"]) == (18, 6, 12)
    assert 0 < later["computed_share"] < first["computed_share"]  # type: ignore[operator]


@contextlib.asynccontextmanager
async def busy(refusals: int) -> AsyncIterator[str]:
    """A server that refuses so many requests, then answers; its URL."""
    left = refusals

    async def answer(_request: web.Request) -> web.Response:
        nonlocal left
        left -= 1
        if left >= 0:
            return web.Response(status=429, headers={"Retry-After": "0"})
        event = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        lines = [*(f"data: {json.dumps(data)}\n\n" for data in (event, usage)), "data: [DONE]\n\n"]
        return web.Response(text="".join(lines), content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def test_who_is_sent_away_comes_again() -> None:
    async with busy(2) as url:
        records = await generate(Load(shape=SHAPE, sessions=1, think_s=0.0), Target(url=url))
    assert [record.error for record in records] == ["status 429"] * 2 + [None] * 3
    assert [record.turn for record in records] == [0, 0, 0, 1, 2]


async def test_who_is_sent_away_too_often_gives_up() -> None:
    async with busy(100) as url:
        records = await generate(Load(shape=SHAPE, sessions=2, think_s=0.0), Target(url=url))
    assert {record.error for record in records} == {"status 429"} and len(records) == 10


async def test_a_server_that_is_not_there_is_an_error() -> None:
    records = await generate(Load(shape=SHAPE, sessions=1), Target(url="http://127.0.0.1:9"))
    assert len(records) == 1 and records[0].error is not None

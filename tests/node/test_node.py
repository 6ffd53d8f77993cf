"""A node over real sockets: readiness while it starts, works, stalls and drains, and what clients get then."""

import asyncio
import io
import json
from pathlib import Path

import prometheus_client.parser
import pytest

from dsuf.config import load_settings
from dsuf.errors import CheckpointError, CommandError
from dsuf.node import node as node_module
from dsuf.node.engines import name_checkpoint
from dsuf.node.node import Node, bind
from dsuf.node.startup import Startup
from dsuf.types import Engine
from tests.node.rig import IDLE, Client, get, running, write_script
from tests.sched.rig import until

SLOW = {"match": "slow", "reply": "one two three four five six seven eight nine ten", "step_s": 0.05}
FAST = {"reply": "Hello, wide world."}


def text_of(stream: bytes) -> str:
    """The answer in a chat stream."""
    events = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


async def test_ready_only_after_loading(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health answers while the engine loads, readiness says what is missing, turns are told to come back."""
    load, loaded = node_module.load_engine, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_load(*args: object) -> Engine:
        asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result(10)
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(node_module, "load_engine", slow_load)
    settings = load_settings(
        {"engine": "scripted", "script": str(write_script(tmp_path, [FAST])), "model": str(model_dir)}
    )
    output = io.StringIO()
    with bind("127.0.0.1", 0) as listener:
        node = Node(settings, listener, Startup(output))
        starting = asyncio.create_task(node.start())
        try:
            await until(lambda: "listening" in output.getvalue())
            assert (await get(node, "/health"))[0] == 200
            status, _, body = await get(node, "/readyz")
            assert (status, body) == (503, {"ready": False, "failing": ["starting: loading weights"]})
            client = await Client.connect(node)
            await client.ask("hi")
            status, headers, body = await client.read_reply()
            assert (status, headers["retry-after"], body["error"]["type"]) == (503, "5", "overloaded_error")
            client.close()
            loaded.set()
            await starting
            assert (await get(node, "/server_info"))[2]["checkpoint"] == name_checkpoint(model_dir)
            assert await get(node, "/readyz") and (await get(node, "/readyz"))[2] == {"ready": True, "failing": []}
        finally:
            assert await node.stop()
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["model", "tokenizer", "listening", "engine", "warm-up"]
    assert all(" s" in line for line in lines[1:6])
    assert lines[1].split()[3:] == [f"{name_checkpoint(model_dir)},", str(model_dir)]
    assert lines[6].startswith("ready in ") and "curl -N http://127.0.0.1:" in output.getvalue()


async def test_a_node_that_computes_prompts_for_others_gives_no_examples(model_dir: Path, tmp_path: Path) -> None:
    """Clients would get 503; it says why there are none to compute for."""
    output = io.StringIO()
    settings = load_settings(
        {
            "engine": "scripted", "script": str(write_script(tmp_path, [FAST])), "model": str(model_dir),
            "role": "prefill", "node_id": "one",
        }
    )  # fmt: skip
    with bind("127.0.0.1", 0) as listener:
        node = Node(settings, listener, Startup(output))
        try:
            await node.start()
            status, headers, _ = await get(node, "/readyz")
            assert (status, headers["x-dsuf-node"]) == (200, "one")
            client = await Client.connect(node)
            await client.ask("hi")
            assert (await client.read_reply())[0] == 503
            client.close()
        finally:
            assert await node.stop()
    assert "without redis_url there are none" in output.getvalue() and "curl" not in output.getvalue()


async def test_draining_cuts_nothing_and_refuses_the_rest(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, write_script(tmp_path, [SLOW, FAST])) as node:
        streams = [await Client.connect(node) for _ in range(4)]
        whole = await Client.connect(node)
        for client in streams:
            await client.ask("slow")
        await whole.ask("slow", stream=False)
        for client in streams:
            await client.read_until(b'"one"')
        draining = asyncio.create_task(node.drain(asyncio.Event()))
        await asyncio.sleep(0.05)
        assert (await get(node, "/readyz"))[0::2] == (503, {"ready": False, "failing": ["draining"]})
        assert (await get(node, "/health"))[0] == 200
        late = await Client.connect(node)
        await late.ask("hi")
        status, headers, _ = await late.read_reply()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "2", "close")
        await draining
        scheduler = node.scheduler
        assert scheduler is not None
        await until(lambda: scheduler.counters() == IDLE)
        assert await node.stop()
        for client in streams:
            rest = await client.read_all()
            assert text_of(rest) == " two three four five six seven eight nine ten"
            assert b"data: [DONE]\n\n" in rest
        status, _, body = await whole.read_reply()
        assert (status, body["choices"][0]["message"]["content"]) == (200, SLOW["reply"])


@pytest.mark.parametrize("hurried", [False, True])
async def test_what_outlasts_the_grace_time_fails_in_band(model_dir: Path, tmp_path: Path, hurried: bool) -> None:
    script = write_script(tmp_path, [{"reply": "word " * 900, "step_s": 0.02}])
    async with running(model_dir, script, drain_s=60 if hurried else 0.2) as node:
        chat, messages = await Client.connect(node), await Client.connect(node)
        await chat.ask("go")
        await messages.ask("go", path="/v1/messages")
        for client in (chat, messages):
            await client.read_until(b"word")
        hurry = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, hurry.set if hurried else int)
        started_s = asyncio.get_running_loop().time()
        await node.drain(hurry)
        assert 0.1 < asyncio.get_running_loop().time() - started_s < 10
        ending = await messages.read_until(b"\r\n0\r\n\r\n")
        assert b"event: error\n" in ending and b'"overloaded_error"' in ending and b"message_stop" not in ending
        broken = await chat.read_all()  # the connection ends without the end of the chunked body
        assert b'data: {"error":' in broken and b"[DONE]" not in broken and not broken.endswith(b"0\r\n\r\n")
        assert await node.stop()


async def test_pitfall_18_a_stuck_engine_is_not_ready_and_not_alive_and_says_so(
    model_dir: Path, tmp_path: Path
) -> None:
    script = write_script(tmp_path, [{"match": "stick", "hang_at_step": 0, "hang_s": 0.5}, FAST])
    async with running(model_dir, script, step_deadline_s=0.2) as node:
        client = await Client.connect(node)
        await client.ask("stick", stream=False)
        status, headers, body = await client.read_reply()
        assert (status, headers["retry-after"], body["error"]["type"]) == (503, "5", "overloaded_error")
        failing = {"failing": ["engine: no step finished within 0.2 s"]}
        assert (await get(node, "/readyz"))[0::2] == (503, {"ready": False} | failing)
        assert (await get(node, "/health"))[0::2] == (503, {"alive": False} | failing)
        await asyncio.sleep(0.5)
        assert (await get(node, "/readyz"))[0] == 200
        client = await Client.connect(node)
        await client.ask("hi", stream=False)
        assert (await client.read_reply())[2]["choices"][0]["message"]["content"] == FAST["reply"]
        client.close()


async def test_a_full_queue_is_told_to_come_back(model_dir: Path, tmp_path: Path) -> None:
    script = write_script(tmp_path, [{"reply": "word " * 900, "step_s": 0.02}])
    async with running(model_dir, script, max_turns=1, queue_limit=1) as node:
        clients = [await Client.connect(node) for _ in range(3)]
        for client in clients:
            await client.ask("go", stream=False)
            await asyncio.sleep(0.1)
        status, headers, body = await clients[2].read_reply()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 10
        for client in clients:
            client.close()


async def test_metrics_and_facts_of_a_served_turn(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, write_script(tmp_path, [FAST])) as node:
        client = await Client.connect(node)
        await client.ask("hi", stream=False)
        usage = (await client.read_reply())[2]["usage"]
        await client.send("GET", "/metrics")
        head = await client.read_until(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        text = (await client.reader.readexactly(length)).decode()
        client.close()
        await until(lambda: node.pulse.lag.summarise().samples > 0)
        facts = (await get(node, "/server_info"))[2]["node"]
    families = {family.name for family in prometheus_client.parser.text_string_to_metric_families(text)}
    assert {"dsuf_prompt_tokens", "vllm:generation_tokens", "dsuf_http_responses"} <= families
    assert f"dsuf_prompt_tokens_total {usage['prompt_tokens']:.1f}" in text
    assert f'vllm:generation_tokens_total{{model_name="deepseek-flash"}} {usage["completion_tokens"]:.1f}' in text
    assert 'dsuf_http_responses_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
    assert facts["turns"] == IDLE and set(facts["engine"].values()) == {0} and facts["loop_lag"]["samples"] > 0


async def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    settings = load_settings({"model": str(tmp_path)})
    with bind("127.0.0.1", 0) as listener:
        node = Node(settings, listener, Startup(io.StringIO()))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            await node.start()
        await node.stop()


def test_a_taken_port_is_one_line() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(CommandError, match="port is in use"):
        bind("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(CommandError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


async def test_an_engine_that_does_not_come_back_is_left_behind(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "FAREWELL_S", 0.1)
    async with running(model_dir, write_script(tmp_path, [FAST])) as node:
        assert node.engine is not None
        with monkeypatch.context() as patch:
            patch.setattr(node.engine, "close", asyncio.Event().wait)
            assert not await asyncio.wait_for(node.stop(), 2)


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_the_printed_url_is_one_that_works(host: str, url: str) -> None:
    try:
        listener = bind(host, 0)
    except CommandError:
        pytest.skip(f"no {host} here")
    with listener:
        assert Node(load_settings(), listener, Startup(io.StringIO())).url.startswith(url)


@pytest.mark.parametrize(
    ("role", "status", "remark"),
    [("prefill", 503, "clients get 503"), ("decode", 200, "they are computed here"), ("both", 200, None)],
)
async def test_roles_without_other_nodes(
    model_dir: Path, tmp_path: Path, role: str, status: int, remark: str | None
) -> None:
    script = write_script(tmp_path, [FAST])
    settings = load_settings({"engine": "scripted", "script": str(script), "model": str(model_dir), "role": role})
    output = io.StringIO()
    with bind("127.0.0.1", 0) as listener:
        node = Node(settings, listener, Startup(output))
        try:
            await node.start()
            client = await Client.connect(node)
            await client.ask("hi", stream=False)
            answered, headers, body = await client.read_reply()
            assert (await get(node, "/server_info"))[2]["node"]["role"] == role
            client.close()
        finally:
            assert await node.stop()
    assert answered == status
    if status == 503:
        assert "computes prompts for other nodes" in body["error"]["message"] and headers["retry-after"] == "10"
    assert ("  role  " in output.getvalue()) == (remark is not None)
    assert remark is None or remark in output.getvalue()

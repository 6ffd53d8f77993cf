"""Replies, whole and streamed, in both protocols."""

import json

import pytest

from dsuf.types import StepResult, Usage
from tests.api.rig import MODEL, Rig, chat_body, hide_ids, message_body, read_events, read_objects, serve

CALL = (
    'Let me see.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="read">\n'
    '<｜DSML｜ parameter name="path" string="true">/etc/hosts</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "read", "parameters": TOOL}}]
MESSAGE_TOOLS = [{"name": "read", "input_schema": TOOL}]
CHAT_PATHS = ["/v1/chat/completions", "/chat/completions", "/beta/chat/completions", "//chat/completions"]
MESSAGE_PATHS = ["/v1/messages", "/messages", "/anthropic/v1/messages", "/anthropic//messages/"]


@pytest.mark.parametrize("path", [*CHAT_PATHS, "/beta/v1/chat/completions"])
async def test_whole_chat(rig: Rig, path: str) -> None:
    rig.play("Hm, a greeting.</think>Hi", " there")
    response = await rig.post(path, chat_body(), x_request_id="abc-1")
    reply = await response.json()
    assert response.status == 200 and response.headers["x-request-id"] == "abc-1"
    assert reply["id"] == "chatcmpl-abc-1" and reply["model"] == MODEL and reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {
        "role": "assistant", "content": "Hi there", "reasoning_content": "Hm, a greeting."
    }  # fmt: skip
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", MESSAGE_PATHS)
async def test_whole_message(rig: Rig, path: str) -> None:
    rig.play("Hm.</think>Hi", " there")
    response = await rig.post(path, message_body(max_tokens=99), x_request_id="abc-2")
    reply = await response.json()
    assert response.status == 200 and response.headers["request-id"] == "abc-2"
    assert reply["id"] == "msg_abc-2" and [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][1]["text"] == "Hi there" and reply["stop_reason"] == "end_turn"
    assert rig.submit.last.turn.sampling.max_tokens == 99


async def test_a_stop_string_ends_the_turn_as_a_stop(rig: Rig) -> None:
    rig.play("Hm.</think>Hi", " STOP", " and", " more")
    reply = await (await rig.chat(stop="STOP")).json()
    assert reply["choices"][0]["message"]["content"] == "Hi "
    assert rig.submit.last.reason == "stop"


async def test_a_stop_string_within_a_step_leaves_the_rest_of_it_out_of_the_count(rig: Rig) -> None:
    ids = rig.vocabulary.encode("Hm.</think>Hi STOP and more")
    rig.play(ids, " never read")
    reply = await (await rig.chat(stop="STOP")).json()
    used = reply["usage"]["completion_tokens"]
    assert 0 < used < len(ids) and rig.submit.last.used_tokens == used


async def test_stream_chat(rig: Rig) -> None:
    rig.play("Hm.</think>Hi", " there", prefilled=True)
    response = await rig.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    chunks = read_objects(text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None, "reasoning_content": ""}
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Hi there"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["prompt_tokens"] == len(rig.submit.last.turn.prompt.ids)


async def test_stream_message(rig: Rig) -> None:
    rig.play("Hm.</think>Hi", " there")
    response = await rig.message(stream=True)
    events = read_events(await response.text())
    assert [name for name, _ in events] == [json.loads(data)["type"] for _, data in events]
    assert [name for name, _ in events if name != "content_block_delta"] == [
        "message_start", "content_block_start", "ping", "content_block_stop", "content_block_start",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize("thinking", ["enabled", "disabled", None])
async def test_thinking_opens_where_the_renderer_left_off(rig: Rig, thinking: str | None) -> None:
    rig.play("Plain text")
    reply = await (await rig.chat(**({"thinking": {"type": thinking}} if thinking else {}))).json()
    reasons = thinking != "disabled"
    assert rig.submit.last.turn.prompt.opens_in == ("reasoning" if reasons else "content")
    message = reply["choices"][0]["message"]
    assert message.get("reasoning_content", "") == ("Plain text" if reasons else "")
    assert message["content"] == ("" if reasons else "Plain text")


async def test_sampling_is_resolved(rig: Rig) -> None:
    sent = {"temperature": 0, "top_p": 0.5, "seed": 7, "max_tokens": 12, "thinking": {"type": "disabled"}}
    await rig.chat(**sent)
    sampling = rig.submit.last.turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.0, 1.0, 7, 12)
    await rig.chat(temperature=0.25, top_p=0.5)
    sampling = rig.submit.last.turn.sampling
    assert (sampling.temperature, round(sampling.top_p, 3), sampling.max_tokens) == (1.0, 0.95, 65536)


async def test_a_seed_is_drawn_for_each_request(rig: Rig) -> None:
    for _ in range(3):
        assert (await rig.chat()).status == 200
    seeds = {ticket.turn.sampling.seed for ticket in rig.submit.tickets}
    assert len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("whole", [False, True])
async def test_tool_calls_in_chat(rig: Rig, whole: bool) -> None:
    rig.play("I look.</think>" + CALL)
    response = await rig.chat(tools=CHAT_TOOLS, stream=not whole)
    if whole:
        message = (await response.json())["choices"][0]["message"]
        calls, text = [call["function"] for call in message["tool_calls"]], message["content"]
    else:
        deltas = [chunk["choices"][0]["delta"] for chunk in read_objects(await response.text())]
        text = "".join(delta.get("content") or "" for delta in deltas)
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        calls = [{"name": pieces[0]["name"], "arguments": "".join(piece["arguments"] for piece in pieces)}]
    assert [call["name"] for call in calls] == ["read"]
    assert json.loads(calls[0]["arguments"]) == {"path": "/etc/hosts"}
    assert text.strip() == "Let me see." and rig.metrics.malformed_calls == 0


async def test_tool_calls_in_messages(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL)
    reply = await (await rig.message(tools=MESSAGE_TOOLS)).json()
    assert reply["stop_reason"] == "tool_use"
    assert reply["content"][-1]["input"] == {"path": "/etc/hosts"} and reply["content"][-1]["name"] == "read"


async def test_a_malformed_call_is_dropped_and_counted(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL.replace(' invoke name="read"', ' involve nome="read"'))
    reply = await (await rig.chat(tools=CHAT_TOOLS)).json()
    assert reply["choices"][0]["finish_reason"] == "stop" and "DSML" not in json.dumps(reply)
    assert rig.metrics.malformed_calls == 1


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_usage_says_where_the_prompt_came_from(rig: Rig, protocol: str) -> None:
    def script(turn):  # type: ignore[no-untyped-def]
        usage = Usage(device_tokens=4, host_tokens=2, peer_tokens=1, computed_tokens=len(turn.prompt.ids) - 7)
        ids = tuple(rig.vocabulary.encode("Hm.</think>Hi"))
        return [StepResult(turn=turn.id, usage=usage), StepResult(turn=turn.id, ids=ids, finish="length")]

    rig.submit.script = script
    ask = rig.chat if protocol == "chat" else rig.message
    whole = (await (await ask()).json())["usage"]
    last = [event["usage"] for event in read_objects(await (await ask(stream=True)).text()) if event.get("usage")][-1]
    prompt_tokens, details = len(rig.submit.last.turn.prompt.ids), whole["prompt_tokens_details"]
    assert whole == last
    assert details == {
        "cached_tokens": 7, "device_tokens": 4, "host_tokens": 2, "peer_tokens": 1,
        "computed_tokens": prompt_tokens - 7,
    }  # fmt: skip
    if protocol == "chat":
        assert whole["prompt_tokens"] == prompt_tokens and whole["prompt_cache_hit_tokens"] == 7
        assert whole["completion_tokens"] == len(rig.vocabulary.encode("Hm.</think>Hi"))
        reasoning_tokens = len(rig.vocabulary.encode("Hm."))
        assert whole["completion_tokens_details"] == {"reasoning_tokens": reasoning_tokens, "decode_steps": 1}
    else:
        assert whole["input_tokens"] == prompt_tokens - 7 and whole["cache_read_input_tokens"] == 7


async def test_usage_all_along(rig: Rig) -> None:
    """On request each event tells how many tokens and steps there were so far; the last tells all, as ever."""
    rig.play("Hm.</think>", "Hi, ", "you there.")
    sizes = [len(rig.vocabulary.encode(piece)) for piece in ("Hm.</think>", "Hi, ", "you there.")]
    asked = await rig.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    told = [event["usage"] for event in read_objects(await asked.text())]
    prompt_tokens = len(rig.submit.last.turn.prompt.ids)
    assert {usage["prompt_tokens"] for usage in told} == {prompt_tokens}
    assert {usage["prompt_tokens_details"]["computed_tokens"] for usage in told} == {prompt_tokens}
    assert all(usage["total_tokens"] == prompt_tokens + usage["completion_tokens"] for usage in told)
    counts = [(usage["completion_tokens"], usage["completion_tokens_details"]["decode_steps"]) for usage in told]
    assert counts == sorted(counts) and counts[0] == (0, 0) and counts[-1] == (sum(sizes), 3)
    assert (sizes[0] + sizes[1], 2) in counts
    plain = await rig.chat(stream=True, stream_options={"include_usage": True})
    assert [event["usage"] for event in read_objects(await plain.text())][:-1] == [None] * (len(told) - 1)


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize("reply", ["", "Hm", "Hm.</think>", "Hm.</think>Hi", "I look.</think>" + CALL, CALL])
@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_whole_is_the_fold_of_the_stream(rig: Rig, protocol: str, reply: str, finish: str) -> None:
    rig.play(*[[token] for token in rig.vocabulary.encode(reply)], finish=finish)
    ask, tools = (rig.chat, CHAT_TOOLS) if protocol == "chat" else (rig.message, MESSAGE_TOOLS)
    whole = json.loads(hide_ids(await (await ask(tools=tools)).text()))
    streamed = read_objects(hide_ids(await (await ask(tools=tools, stream=True)).text()))
    assert (fold_chat if protocol == "chat" else fold_message)(streamed) == pick(whole)


def pick(whole: dict) -> dict:
    """What a client reads of a whole reply."""
    if "choices" in whole:
        message = whole["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        texts = (message.get("reasoning_content") or "", message.get("content") or "")
        return {"texts": texts, "calls": calls, "end": whole["choices"][0]["finish_reason"], "usage": whole["usage"]}
    blocks = [
        (block["type"], block.get("thinking") or block.get("text") or json.dumps(block.get("input", "")))
        for block in whole["content"]
    ]
    return {"blocks": blocks, "end": whole["stop_reason"], "usage": whole["usage"]}


def fold_chat(chunks: list[dict]) -> dict:
    """What a client reads of a chat stream, in the form of `pick`."""
    reasoning, content, calls = "", "", []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return {
        "texts": (reasoning, content), "calls": [tuple(call) for call in calls],
        "end": chunks[-1]["choices"][0]["finish_reason"], "usage": chunks[-1]["usage"],
    }  # fmt: skip


def fold_message(events: list[dict]) -> dict:
    """What a client reads of a Messages stream, in the form of `pick`."""
    blocks: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], ""])
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    for block in blocks:
        if block[0] == "tool_use":
            block[1] = json.dumps(json.loads(block[1] or "{}"))
    ending = next(event for event in events if event["type"] == "message_delta")
    picked = [(kind, text or '""') for kind, text in blocks]
    return {"blocks": picked, "end": ending["delta"]["stop_reason"], "usage": ending["usage"]}


async def test_max_tokens_is_clamped_to_what_the_prompt_leaves(vocabulary) -> None:  # type: ignore[no-untyped-def]
    async with serve(vocabulary, context_tokens=400) as rig:
        assert (await rig.chat(max_tokens=256_000)).status == 200
        turn = rig.submit.last.turn
        assert turn.sampling.max_tokens == 400 - len(turn.prompt.ids)
        assert (await rig.chat()).status == 200
        assert rig.submit.last.turn.sampling.max_tokens == 400 - len(turn.prompt.ids)
        response = await rig.chat(messages=[{"role": "user", "content": "word " * 500}], max_tokens=5)
        assert response.status == 400
        assert "maximum context length is 400 tokens" in (await response.json())["error"]["message"]
    async with serve(vocabulary, context_tokens=400, clamp_max_tokens=False) as rig:
        response = await rig.message(max_tokens=256_000)
        error = await response.json()
        assert response.status == 400 and error["type"] == "error"
        assert "maximum context length is 400 tokens" in error["error"]["message"]


async def test_a_claude_name_is_served_on_messages_only(rig: Rig) -> None:
    rig.play("Hm.</think>Hi")
    reply = await (await rig.message(model="claude-sonnet-9")).json()
    assert reply["model"] == "claude-sonnet-9"
    assert (await rig.chat(model="claude-sonnet-9")).status == 400


async def test_what_openai_spells_otherwise(rig: Rig) -> None:
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for messages in (system, developer):
        assert (await rig.chat(messages=messages, max_completion_tokens=17)).status == 200
    first, second = (ticket.turn for ticket in rig.submit.tickets)
    assert first.prompt.ids == second.prompt.ids and second.sampling.max_tokens == 17
    await rig.chat(max_completion_tokens=17, max_tokens=3)
    assert rig.submit.last.turn.sampling.max_tokens == 3


async def test_session_and_turn_ids(rig: Rig) -> None:
    for _ in range(2):
        await rig.post("/v1/messages", message_body(), x_request_id="same", x_deepseek_harness_session_id="session-1")
    first, second = (ticket.turn for ticket in rig.submit.tickets)
    assert first.session == second.session == "session-1" and first.id != second.id
    response = await rig.post("/v1/messages", message_body(), x_request_id="x" * 129)
    assert response.headers["x-request-id"] != "x" * 129

"""OpenAI Responses: events, whole replies, what is echoed, what is refused, failures in the midst."""

import json
from typing import Any

import openai
import pytest

from dsuf.errors import EngineFailed, Unavailable
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import StepResult, Turn, Usage
from tests.api.rig import MODEL, Rig, Step, read_events, read_objects, serve
from tests.api.test_generation import CALL, TOOL

TOOLS = [{"type": "function", "name": "read", "parameters": TOOL}]
OFF = {"reasoning": {"effort": "none"}}


async def respond(rig: Rig, **fields: Any) -> Any:
    """A request with `fields` over a small default body."""
    return await rig.post("/v1/responses", {"model": MODEL, "input": "Say hi."} | fields)


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "//v1/responses/"])
async def test_whole(rig: Rig, path: str) -> None:
    rig.play("Hm.</think>Hi", " there")
    body = {"model": MODEL, "input": "Say hi.", "instructions": "Be brief.", "max_output_tokens": 99}
    response = await rig.post(path, body, x_request_id="abc-3")
    reply = await response.json()
    assert response.status == 200 and reply["id"] == "resp_abc-3" and reply["object"] == "response"
    assert (reply["status"], reply["model"], reply["instructions"]) == ("completed", MODEL, "Be brief.")
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["output"][1]["content"][0]["text"] == "Hi there"
    assert rig.submit.last.turn.sampling.max_tokens == reply["max_output_tokens"] == 99
    assert rig.submit.last.turn.prompt.opens_in == "reasoning"


async def test_items_render_as_the_messages_of_a_chat_do(rig: Rig) -> None:
    call = {"name": "read", "arguments": '{"path": "x"}'}
    items = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Read x."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I read."}]},
        {"type": "function_call", "call_id": "c1", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "one line"},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read x."},
        {"role": "assistant", "content": "", "reasoning_content": "I read.",
         "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "one line"},
    ]  # fmt: skip
    assert (await respond(rig, input=items, tools=TOOLS)).status == 200
    assert (
        await rig.chat(
            messages=messages, tools=[{"type": "function", "function": {"name": "read", "parameters": TOOL}}]
        )
    ).status == 200
    first, second = (ticket.turn.prompt.ids for ticket in rig.submit.tickets)
    assert first == second


async def test_stream(rig: Rig) -> None:
    rig.play("Hm.</think>Hi", " there", prefilled=True)
    text = await (await respond(rig, stream=True)).text()
    events = read_events(text)
    objects = [json.loads(data) for _, data in events]
    assert [name for name, _ in events] == [item["type"] for item in objects] and "[DONE]" not in text
    assert [item["sequence_number"] for item in objects] == list(range(len(objects)))
    assert objects[0]["type"] == "response.created" and objects[-1]["type"] == "response.completed"
    deltas = [item["delta"] for item in objects if item["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Hi there" and len(deltas) == 2


async def test_whole_is_what_the_stream_ends_with(rig: Rig) -> None:
    for reply, finish in [
        ("Hm.</think>Hi", "stop"),
        ("Hm", "length"),
        ("I look.</think>" + CALL, "stop"),
        ("", "stop"),
    ]:
        rig.play(*[[token] for token in rig.vocabulary.encode(reply)], finish=finish)
        whole = hide(await (await respond(rig, tools=TOOLS)).json())
        last = read_objects(await (await respond(rig, tools=TOOLS, stream=True)).text())[-1]
        assert hide(last["response"]) == whole
        assert whole["status"] == ("completed" if finish == "stop" else "incomplete")


def hide(response: dict[str, Any]) -> dict[str, Any]:
    """`response` without what differs between two equal ones."""
    items = [{name: value for name, value in item.items() if name not in HIDDEN} for item in response["output"]]
    return {name: value for name, value in response.items() if name not in HIDDEN} | {"output": items}


HIDDEN = ("id", "created_at", "completed_at", "call_id", "encrypted_content")


async def test_tool_calls(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL)
    reply = await (await respond(rig, tools=TOOLS)).json()
    call = reply["output"][-1]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "read", "completed")
    assert json.loads(call["arguments"]) == {"path": "/etc/hosts"} and call["call_id"]
    assert rig.metrics.malformed_calls == 0


async def test_a_malformed_call_is_counted(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL.replace(' invoke name="read"', ' involve nome="read"'))
    reply = await (await respond(rig, tools=TOOLS)).json()
    assert reply["status"] == "completed" and "DSML" not in json.dumps(reply) and rig.metrics.malformed_calls == 1


async def test_tools_of_a_namespace_get_their_names_back(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL.replace('"read"', '"files::read"'))
    space = {"type": "namespace", "name": "files", "description": "Files.", "tools": TOOLS}
    call = (await (await respond(rig, tools=[space])).json())["output"][-1]
    assert (call["namespace"], call["name"]) == ("files", "read")


async def test_names_in_tools_are_not_taken_for_usage(rig: Rig) -> None:
    """The response repeats the tools, in which every name can stand that the server looks for."""
    rig.play("Hm.</think>Hi")
    properties = {"usage": {"type": "object", "properties": {}}, "finish_reason": {"type": "string"}}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": properties}}]
    objects = read_objects(await (await respond(rig, tools=tools, stream=True)).text())
    for item in (objects[0], objects[1], objects[-1]):
        assert item["response"]["tools"][0]["parameters"]["properties"] == properties
    whole = await (await respond(rig, tools=tools)).json()
    assert whole["tools"][0]["parameters"]["properties"] == properties and whole["usage"]["output_tokens"] == 5


async def test_usage_says_where_the_prompt_came_from(rig: Rig) -> None:
    def script(turn):  # type: ignore[no-untyped-def]
        usage = Usage(device_tokens=4, host_tokens=2, peer_tokens=1, computed_tokens=len(turn.prompt.ids) - 7)
        ids = tuple(rig.vocabulary.encode("Hm.</think>Hi"))
        return [StepResult(turn=turn.id, usage=usage), StepResult(turn=turn.id, ids=ids, finish="stop")]

    rig.submit.script = script
    usage = (await (await respond(rig)).json())["usage"]
    prompt_tokens = len(rig.submit.last.turn.prompt.ids)
    assert usage["input_tokens"] == prompt_tokens and usage["total_tokens"] == prompt_tokens + usage["output_tokens"]
    assert usage["input_tokens_details"] == {
        "cached_tokens": 7, "device_tokens": 4, "host_tokens": 2, "peer_tokens": 1,
        "computed_tokens": prompt_tokens - 7,
    }  # fmt: skip
    reasoning_tokens = len(rig.vocabulary.encode("Hm."))
    assert usage["output_tokens_details"] == {"reasoning_tokens": reasoning_tokens, "decode_steps": 1}


async def test_log_probabilities(vocabulary: Vocabulary) -> None:
    """Those of the answer stand beside its text, in the events and in the whole."""
    async with serve(vocabulary, logprobs=True) as rig:
        await check_log_probabilities(rig)


async def check_log_probabilities(rig: Rig) -> None:
    ids = rig.vocabulary.encode("Hm.</think>Hi you")

    def script(turn: Turn) -> list[Step]:
        steps: list[Step] = [
            StepResult(turn=turn.id, ids=(token,), logprobs=((-0.5, ((token, -0.5),)),)) for token in ids
        ]
        return [*steps, StepResult(turn=turn.id, finish="stop")]

    rig.submit.script = script
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = await (await respond(rig, **fields)).json()
    told = whole["output"][1]["content"][0]["logprobs"]
    assert [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in told] == [
        ("Hi", -0.5, 1),
        (" you", -0.5, 1),
    ]
    events = read_objects(await (await respond(rig, stream=True, **fields)).text())
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == told


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"), ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]}, "input"),
    ],
)  # fmt: skip
async def test_what_needs_a_state_is_refused(rig: Rig, fields: dict[str, Any], param: str) -> None:
    response = await respond(rig, **fields)
    error = (await response.json())["error"]
    assert response.status == 400 and (error["code"], error["param"]) == ("unsupported_feature", param)
    assert rig.submit.tickets == []


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": None, "conversation": None, "background": False, "prompt": None}, {"store": True},
        {"truncation": "auto", "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}},
        {"tools": [{"type": "web_search"}]}, {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"input": 'She wrote {"type": "item_reference"}.'},
    ],
)  # fmt: skip
async def test_what_changes_nothing_is_ignored(rig: Rig, fields: dict[str, Any]) -> None:
    rig.play("Hm.</think>Hi")
    assert (await respond(rig, **fields)).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"input": ...}, {"input": []}, {"model": ...}, {"model": "gpt-9"}, {"max_output_tokens": 0}, {"temperature": 3},
        {"reasoning": {"effort": "vast"}}, {"tools": [{"type": "custom", "name": "x"}]},
        {"tools": TOOLS, "tool_choice": "required"}, {"text": {"format": {"type": "json_object"}}},
        {"tool_choice": "required", "reasoning": {"effort": "none"}},
        {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    ],
)  # fmt: skip
async def test_what_the_library_refuses(rig: Rig, fields: dict[str, Any]) -> None:
    body = {name: value for name, value in ({"model": MODEL, "input": "x"} | fields).items() if value is not ...}
    response = await rig.post("/v1/responses", body)
    assert response.status == 400 and (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_a_failure_ends_the_stream_with_its_own_event(rig: Rig, tokens: int) -> None:
    ids = rig.vocabulary.encode("Hm.")[:tokens]
    rig.submit.script = lambda turn: [
        *[StepResult(turn=turn.id, ids=(token,)) for token in ids], EngineFailed("the engine failed")
    ]  # fmt: skip
    objects = read_objects(await (await respond(rig, stream=True)).text())
    failed = objects[-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine failed"}
    assert failed["response"]["id"] == objects[0]["response"]["id"]
    assert [item["sequence_number"] for item in objects] == list(range(len(objects)))
    response = await respond(rig)
    assert response.status == 500 and (await response.json())["error"]["type"] == "api_error"


async def test_sdk(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL)
    async with openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="sk-local", max_retries=0) as client:
        reply = await client.responses.create(model=MODEL, input="Read it.", tools=TOOLS)
        assert reply.output[-1].type == "function_call" and reply.output[-1].name == "read"
        assert reply.output_text.strip() == "Let me see."
        rig.play("Hm.</think>Hi", " there")
        async with client.responses.stream(model=MODEL, input="Say hi.") as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(pieces) == final.output_text == "Hi there" and final.status == "completed"
        assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        assert refused.value.code == "unsupported_feature"
        rig.submit.refusal = Unavailable("starting")
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model=MODEL, input="x")

"""What comes back of a reply is the beginning of the next prompt, token by token, in every protocol that has turns."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.rig import MODEL, Rig, read_objects
from tests.api.test_generation import CALL, CHAT_TOOLS, MESSAGE_TOOLS, TOOL

REPLIES = [
    "I look.</think>" + CALL,
    "I look.</think>So, 世界:" + CALL.removeprefix("Let me see."),
    "Hm.</think>Hi there 👋🏽.",
]
RESPONSE_TOOLS = [{"type": "function", "name": "read", "parameters": TOOL}]
Body = dict[str, Any]


def follow_chat(body: Body, reply: Body) -> Body:
    """The next request of a chat."""
    said = reply["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in said.get("tool_calls") or []]
    return body | {"messages": [*body["messages"], said, *(results or [{"role": "user", "content": "And?"}])]}


def follow_message(body: Body, reply: Body) -> Body:
    """The next request of Messages."""
    calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id_, "content": "ok"} for id_ in calls]
    said = {"role": "assistant", "content": reply["content"]}
    return body | {"messages": [*body["messages"], said, {"role": "user", "content": results or "And?"}]}


def follow_response(body: Body, reply: Body) -> Body:
    """The next request of Responses."""
    calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": id_, "output": "ok"} for id_ in calls]
    return body | {"input": [*body["input"], *reply["output"], *(results or [{"role": "user", "content": "And?"}])]}


ASKED = [{"role": "user", "content": "Read it."}]
PROTOCOLS: dict[str, tuple[Body, Callable[[Body, Body], Body]]] = {
    "/v1/chat/completions": ({"messages": ASKED, "tools": CHAT_TOOLS}, follow_chat),
    "/v1/messages": ({"messages": ASKED, "tools": MESSAGE_TOOLS, "max_tokens": 500}, follow_message),
    "/v1/responses": ({"input": ASKED, "tools": RESPONSE_TOOLS}, follow_response),
}


@pytest.mark.parametrize("text", REPLIES)
@pytest.mark.parametrize("path", PROTOCOLS)
async def test_the_next_prompt_begins_with_this_one_and_its_reply(rig: Rig, path: str, text: str) -> None:
    fields, follow = PROTOCOLS[path]
    body = {"model": MODEL} | fields
    rig.play(text)
    reply = await (await rig.post(path, body)).json()
    assert (await rig.post(path, follow(body, reply))).status == 200
    first, second = (ticket.turn.prompt.ids for ticket in rig.submit.tickets)
    whole = (*first, *rig.vocabulary.encode(text), rig.vocabulary.eos_id)
    assert second[: len(whole)] == whole


async def test_a_streamed_response_can_be_sent_back(rig: Rig) -> None:
    """Its last event holds the whole response."""
    fields, follow = PROTOCOLS["/v1/responses"]
    body = {"model": MODEL} | fields
    rig.play(*[[token] for token in rig.vocabulary.encode(REPLIES[0])])
    events = read_objects(await (await rig.post("/v1/responses", body | {"stream": True})).text())
    await rig.post("/v1/responses", follow(body, events[-1]["response"]))
    first, second = (ticket.turn.prompt.ids for ticket in rig.submit.tickets)
    assert second[: len(first)] == first and REPLIES[0] in rig.vocabulary.decode(second[len(first) :])
    assert json.loads(events[-1]["response"]["output"][-1]["arguments"]) == {"path": "/etc/hosts"}

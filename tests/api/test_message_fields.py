"""Every accepted and every refused value of a Messages request, with status, envelope and message."""

import json
from typing import Any

import pytest

from tests.api.rig import Rig

USER = {"role": "user", "content": "Hi."}
TOOL = {"name": "read", "input_schema": {"type": "object"}}
LATER = {"name": "write", "input_schema": {"type": "object"}, "defer_loading": True}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {"a": 1}}]}
OFF = {"thinking": {"type": "disabled"}}
TEXT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "All well."}}
INLINE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def result(content: Any = "done") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content}]}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}, USER]}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


# (fields, what the rendered prompt must contain)
ACCEPTED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing but what is needed": ({}, "<｜User｜>Hi.<｜Assistant｜><think>"),
    "max_tokens beyond the bound": ({"max_tokens": 500_000}, ""),
    "thinking enabled": ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "<｜Assistant｜><think>"),
    "thinking adaptive": ({"thinking": {"type": "adaptive"}}, "<｜Assistant｜><think>"),
    "thinking disabled": (OFF, "<｜Assistant｜></think>"),
    "effort low": ({"output_config": {"effort": "low"}}, "Reasoning Effort: 50 "),
    "effort high": ({"output_config": {"effort": "high"}}, "Reasoning Effort: 75 "),
    "effort xhigh": ({"output_config": {"effort": "xhigh"}}, "Reasoning Effort: 75 "),
    "effort max": ({"output_config": {"effort": "max"}}, "Reasoning Effort: 100 "),
    "ignored names": (
        {"output_config": {"format": None}, "top_k": 5, "metadata": {"user_id": "x"},
         "container": "c", "mcp_servers": [], "dsh_session_log": [{"a": 1}], "xyzzy": 1}, "",
    ),
    "stop_sequences 16": ({"stop_sequences": [str(i) for i in range(16)]}, ""),
    "system string": ({"system": "Be brief."}, "Be brief.<｜User｜>"),
    "system blocks": ({"system": [{"type": "text", "text": "Be brief."}]}, "Be brief.<｜User｜>"),
    "system in the middle": (
        {"messages": [USER, {"role": "assistant", "content": "x"}, {"role": "system", "content": "Now."}, USER]},
        "<｜System｜>Now.<｜User｜>",
    ),
    "thinking block": (said({"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "x"}),
                       "</think>x<｜end▁of▁sentence｜>"),
    "document": (user({**TEXT, "title": "Log", "context": "Old."}), "<｜User｜>Log\n\nOld.\n\nAll well.<"),
    "document of blocks": (user({"type": "document", "source": {"type": "content", "content": [
        {"type": "text", "text": "All"}, {"type": "text", "text": "well."}]}}), "<｜User｜>All\n\nwell.<"),
    "document of a string": (user({"type": "document", "source": {"type": "content", "content": "All well."}}),
                             "<｜User｜>All well.<｜Assistant｜>"),
    "document in a result": ({"tools": [TOOL], "messages": [USER, USE, result([TEXT])]},
                             "<tool_result>All well.</tool_result>"),
    "document that is no text": (user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf",
                                                                      "data": "JVBERg=="}}),
                                 "[Unsupported document type: application/pdf]"),
    "tool of no type": ({"tools": [{"type": None, **TOOL}]}, '{"name": "read"'),
    "tool of the client's own": ({"tools": [{"type": "custom", **TOOL}]}, '{"name": "read"'),
    "tool use and result": ({"tools": [TOOL], "messages": [USER, USE, result()]}, "<tool_result>done</tool_result>"),
    "tool_choice auto": ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, '{"name": "read"'),
    "tool_choice none": ({"tools": [TOOL], "tool_choice": {"type": "none"}}, ""),
    "tool_choice without tools": ({"tool_choice": {"type": "auto"}}, ""),
    "tool added later": (
        {"tools": [TOOL, LATER], "messages": [USER, {"role": "system", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "write"}}]}, USER]},
        "Updated Tool Schemas",
    ),
    "last message of the assistant": ({"messages": [USER, {"role": "assistant", "content": "So"}]},
                                      "So<｜end▁of▁sentence｜><｜Assistant｜><think>"),
    "stream": ({"stream": True}, ""),
}  # fmt: skip

NOT_YET: dict[str, tuple[dict[str, Any], str, str]] = {
    "picture inline": (user(INLINE), "pictures", "messages"),
    "picture url": (user({"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}}), "pictures",
                    "messages"),
    "picture in a tool result": ({"messages": [USER, USE, result([INLINE])], "tools": [TOOL]}, "pictures", "messages"),
    "form": ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format", ""),
    "tool_choice any": ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice", "tool_choice"),
    "tool_choice named": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "read"}, **OFF}, "tool_choice",
                          "tool_choice"),
}  # fmt: skip

REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "model missing": ({"model": ...}, "missing field `model`"),
    "model unknown": ({"model": "gpt-9"}, "The supported API model names are"),
    "messages missing": ({"messages": ...}, "missing field `messages`"),
    "messages empty": ({"messages": []}, "at least one message is required"),
    "role tool": ({"messages": [{"role": "tool", "content": "x"}]}, "unknown variant `tool`"),
    "max_tokens 0": ({"max_tokens": 0}, "the valid range of max_tokens is [1, 393216]"),
    "max_tokens negative": ({"max_tokens": -1}, "integer `-1`, expected u32"),
    "temperature": ({"temperature": 2.5}, "the valid range of temperature is [0, 2]"),
    "top_p": ({"top_p": 0}, "the valid range of top_p is (0, 1.0]"),
    "thinking word": ({"thinking": {"type": "sometimes"}}, "unknown variant `sometimes`"),
    "effort word": ({"output_config": {"effort": "bad"}}, "unknown variant `bad`"),
    "stop_sequences 17": ({"stop_sequences": [str(i) for i in range(17)]}, "Stop string array too long: 17"),
    "stop_sequences empty string": ({"stop_sequences": [""]}, "Invalid 'stop[0]': empty string"),
    "stream string": ({"stream": "yes"}, 'string "yes", expected a boolean'),
    "redacted_thinking": (said({"type": "redacted_thinking", "data": "x"}), "unknown variant `redacted_thinking`"),
    "tool_removal": (said({"type": "tool_removal", "tool": {}}), "unknown variant `tool_removal`"),
    "server_tool_use": (said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}),
                        "server tools are not supported"),
    "picture file": (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "file_id is not supported"),
    "result of no call": ({"messages": [result()]}, "must have a corresponding `tool_use` block"),
    "web search": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
                   "server tools are not supported"),
    "tool_choice named, thinking": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "read"}},
                                    "Thinking mode does not support this tool_choice"),
    "tool_choice any, no tools": ({"tool_choice": {"type": "any"}}, "there are no `tools` to call"),
    "tool_choice named, no tools": ({"tool_choice": {"type": "tool", "name": "read"}, **OFF},
                                    "there are no `tools` to call"),
    "all tools later": ({"tools": [LATER]}, "at least one tool must have defer_loading=false"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
async def test_accepted(rig: Rig, name: str) -> None:
    fields, rendered = ACCEPTED[name]
    rig.play("Hm.</think>Hi")
    response = await rig.message(**({"messages": [USER]} | fields))
    assert response.status == 200, await response.text()
    assert rig.submit.last.ended
    assert rendered in rig.vocabulary.decode(rig.submit.last.turn.prompt.ids)


async def test_max_tokens_is_lowered_to_the_bound(rig: Rig) -> None:
    assert (await rig.message(max_tokens=500_000)).status == 200
    assert rig.submit.last.turn.sampling.max_tokens == 393_216


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_thread(rig: Rig, path: str, thread: dict[str, str]) -> None:
    """Refused in the words after which the SDK sends the whole conversation; flaws of what goes on do not count."""
    sent = {"model": "deepseek-flash", "messages": [result()], "thread": thread}
    response = await rig.post(path, json.dumps(sent).encode())
    error = (await response.json())["error"]
    assert response.status == 400 and "`thread` is not served" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("name", NOT_YET)
async def test_not_served_yet(rig: Rig, name: str) -> None:
    fields, named, _ = NOT_YET[name]
    assert named in await refused(rig, await rig.message(**({"messages": [USER]} | fields)))


@pytest.mark.parametrize("name", REJECTED)
async def test_rejected(rig: Rig, name: str) -> None:
    fields, message = REJECTED[name]
    assert message in await refused(rig, await rig.message(**({"messages": [USER]} | fields)))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b"[" * 100_000])
async def test_bodies(rig: Rig, body: bytes) -> None:
    assert "invalid" in await refused(rig, await rig.post("/v1/messages", body))


async def refused(rig: Rig, response: Any) -> str:
    """The message of a refusal, whose envelope is checked; nothing may have reached the scheduler."""
    assert response.status == 400 and response.content_type == "application/json"
    body = await response.json()
    request_id = response.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    assert body == {"type": "error", "error": body["error"], "request_id": request_id}
    assert body["error"]["type"] == "invalid_request_error" and rig.submit.tickets == []
    message: str = body["error"]["message"]
    return message

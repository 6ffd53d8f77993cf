"""Every accepted and every refused value of every field of a chat completion, with status, envelope and message.

What the library refuses is refused in its words; what it accepts and is not served yet is refused by name.
"""

import json
from typing import Any

import pytest

from tests.api.rig import Rig

USER = {"role": "user", "content": "Say hi in json."}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "done"}
OFF = {"thinking": {"type": "disabled"}}
PNG = "data:image/png;base64,iVBORw0KGgo="


def tool(name: str = "read", **function: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema} | function}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def after(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


def calling(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [CALL | call]}


FORCED = {"type": "function", "function": {"name": "read"}}

ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing but what is needed": {},
    "roles": {"messages": [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "hi"},
                           {"role": "latest_reminder", "content": "now"}, USER]},
    "role developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "content empty": user(""),
    "content no parts": user([]),
    "content parts": user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    "assistant with reasoning": after({"role": "assistant", "content": "x", "reasoning_content": "y"}, USER),
    "assistant with calls": after(calling(), ANSWER) | {"tools": [tool()]},
    "call with broken arguments": after(calling(function={"name": "read", "arguments": "{broken"}), ANSWER),
    "tool content parts": after(calling(), ANSWER | {"content": [{"type": "text", "text": "a"}]}),
    "prefix": after({"role": "assistant", "content": "So", "prefix": True}),
    "prefix of reasoning": after({"role": "assistant", "content": "", "reasoning_content": "So", "prefix": True}),
    "prefix on a user message": {"messages": [USER | {"prefix": True}]},
    "last message of the assistant": after({"role": "assistant", "content": "So"}),
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens largest": {"max_tokens": 393_216},
    "max_tokens null": {"max_tokens": None},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "temperature 0": {"temperature": 0},
    "temperature 2": {"temperature": 2},
    "temperature null": {"temperature": None},
    "top_p small": {"top_p": 0.001},
    "top_p 1": {"top_p": 1},
    "top_p null": {"top_p": None},
    "top_k, min_p, repetition_penalty": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    "penalties": {"frequency_penalty": 2, "presence_penalty": -2},
    "n 1": {"n": 1},
    "ignored names": {"best_of": 1, "logit_bias": {}, "prediction": None, "modalities": ["text"], "store": True,
                      "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "functions": [],
                      "guided_json": {}, "structured_outputs": {}, "chat_template_kwargs": {"a": 1}, "xyzzy": [1]},
    "logprobs false": {"logprobs": False},
    "stop string": {"stop": "END"},
    "stop 16": {"stop": [str(i) for i in range(16)]},
    "stop none": {"stop": []},
    "stop null": {"stop": None},
    "seed 0": {"seed": 0},
    "seed largest": {"seed": 2**63 - 1},
    "seed null": {"seed": None},
    "stream false": {"stream": False},
    "stream true": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    **{f"thinking {word}": {"thinking": {"type": word, "budget_tokens": 9}}
       for word in ("enabled", "adaptive", "disabled")},
    **{f"effort {word}": {"reasoning_effort": word}
       for word in ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra", None)},
    "tools": {"tools": [tool()]},
    "tools many": {"tools": [tool(f"tool-{i}_" + "x" * 80) for i in range(1000)]},
    "tools strict": {"tools": [tool(strict=True)]},
    "tool_choice auto": {"tools": [tool()], "tool_choice": "auto"},
    "tool_choice none": {"tools": [tool()], "tool_choice": "none"},
    "tool_choice null": {"tools": [tool()], "tool_choice": None},
    "tool_choice without tools": {"tool_choice": "auto"},
    "response_format text": {"response_format": {"type": "text"}},
    "response_format json with tools": {"response_format": {"type": "json_object"}, "tools": [tool()]},
    "user and user_id": {"user": "me", "user_id": "me-2"},
}  # fmt: skip

# Accepted by the library, not served yet: (fields, what the message names, `param`).
NOT_YET: dict[str, tuple[dict[str, Any], str, str]] = {
    "logprobs": ({"logprobs": True}, "logprobs", "logprobs"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 20}, "logprobs", "logprobs"),
    "tool_choice required": ({"tools": [tool()], "tool_choice": "required", **OFF}, "tool_choice", "tool_choice"),
    "tool_choice named": ({"tools": [tool()], "tool_choice": FORCED, **OFF}, "tool_choice", "tool_choice"),
    "json_object": ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        "json_schema",
        "response_format",
    ),
    "regex": ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "response_format"),
    "picture url": (user([{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]), "pictures", "messages"),
    "picture inline": (user([{"type": "image_url", "image_url": {"url": PNG}}]), "pictures", "messages"),
    "picture in a tool result": (
        after(calling(), ANSWER | {"content": [{"type": "image_url", "image_url": {"url": PNG}}]}),
        "pictures",
        "messages",
    ),
    "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
    "audio": ({"modalities": ["text", "audio"]}, "modality", "modalities"),
}

RANGE = "the valid range of"
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "model missing": ({"model": ...}, "missing field `model`"),
    "model unknown": ({"model": "gpt-9"}, "The supported API model names are"),
    "messages missing": ({"messages": ...}, "missing field `messages`"),
    "messages empty": ({"messages": []}, "Empty input messages"),
    "role function": (after({"role": "function", "content": "x", "name": "f"}), "unknown variant `function`"),
    "role other": (after({"role": "critic", "content": "x"}), "unknown variant `critic`"),
    "content null": (user(None), "content should be a string or a list"),
    "content missing": ({"messages": [{"role": "user"}]}, "missing field `content`"),
    "content number": (user(3), "content should be a string or a list"),
    "tool content null": (after(calling(), ANSWER | {"content": None}), "content should be a string or a list"),
    "input_audio": (user([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]), "`input_audio`"),
    "file_id": (user([{"type": "file", "file": {"file_id": "f"}}]), "file must have a file_id or file_data"),
    "bad url": (user([{"type": "image_url", "image_url": {"url": "nonsense"}}]), "Unsupported image_url format"),
    "bad base64": (
        user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}]), "Invalid base64 data"
    ),
    "svg": (
        user([{"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AAAA"}}]), "unsupported image"
    ),
    "assistant empty": (after({"role": "assistant"}), "content or tool_calls must be set"),
    "assistant picture": (
        after({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}),
        "Image in assistant message is not supported",
    ),
    "tool without id": (after(calling(), {"role": "tool", "content": "x"}), "missing field `tool_call_id`"),
    "tool orphan": (after(ANSWER), "must be a response to a preceding message with 'tool_calls'"),
    "calls unanswered": (after(calling(), USER), "must be followed by tool messages"),
    "prefix not last": (after({"role": "assistant", "content": "x", "prefix": True}, USER), "prefix set true"),
    "max_tokens 0": ({"max_tokens": 0}, f"{RANGE} max_tokens is [1, 393216]"),
    "max_tokens large": ({"max_tokens": 393_217}, f"{RANGE} max_tokens is [1, 393216]"),
    "max_tokens negative": ({"max_tokens": -1}, "integer `-1`, expected u32"),
    "max_tokens float": ({"max_tokens": 1.5}, "floating point `1.5`, expected u32"),
    "max_tokens string": ({"max_tokens": "5"}, 'string "5", expected u32'),
    "max_tokens 2^32": ({"max_tokens": 2**32}, "integer `4294967296`, expected u32"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, f"{RANGE} max_tokens is [1, 393216]"),
    "temperature high": ({"temperature": 2.1}, f"{RANGE} temperature is [0, 2]"),
    "temperature negative": ({"temperature": -0.1}, f"{RANGE} temperature is [0, 2]"),
    "temperature string": ({"temperature": "1"}, 'string "1", expected f32'),
    "top_p 0": ({"top_p": 0}, f"{RANGE} top_p is (0, 1.0]"),
    "top_p negative": ({"top_p": -1}, f"{RANGE} top_p is (0, 1.0]"),
    "top_p high": ({"top_p": 1.1}, f"{RANGE} top_p is (0, 1.0]"),
    "frequency_penalty": ({"frequency_penalty": 2.5}, f"{RANGE} frequency_penalty is [-2, 2]"),
    "presence_penalty": ({"presence_penalty": -2.5}, f"{RANGE} presence_penalty is [-2, 2]"),
    "n 2": ({"n": 2}, "only n = 1 is supported"),
    "logprobs integer": ({"logprobs": 5}, "integer `5`, expected a boolean"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, f"{RANGE} top_logprobs is [0, 20]"),
    "top_logprobs alone": ({"top_logprobs": 3}, "logprobs must be set to true if top_logprobs is used"),
    "top_logprobs negative": ({"logprobs": True, "top_logprobs": -1}, "integer `-1`, expected u8"),
    "stop empty": ({"stop": ""}, "Invalid 'stop': empty string"),
    "stop with an empty one": ({"stop": ["a", ""]}, "Invalid 'stop[1]': empty string"),
    "stop 17": ({"stop": [str(i) for i in range(17)]}, "Stop string array too long: 17"),
    "stop number": ({"stop": 5}, "expected a string or a list"),
    "stop numbers": ({"stop": [5]}, "integer `5`, expected a string"),
    "seed 2^63": ({"seed": 2**63}, f"{RANGE} seed is [0, 2^63)"),
    "seed negative": ({"seed": -1}, "integer `-1`, expected u64"),
    "seed float": ({"seed": 1.5}, "floating point `1.5`, expected u64"),
    "seed string": ({"seed": "1"}, 'string "1", expected u64'),
    "stream string": ({"stream": "yes"}, 'string "yes", expected a boolean'),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "along with stream = true"),
    "thinking word": ({"thinking": {"type": "sometimes"}}, "unknown variant `sometimes`"),
    "thinking bool": ({"thinking": True}, "boolean `true`, expected struct"),
    "thinking null": ({"thinking": {"type": None}}, "invalid type: null"),
    "effort word": ({"reasoning_effort": "extreme"}, "unknown variant `extreme`"),
    "effort number": ({"reasoning_effort": 3}, "integer `3`"),
    "tool without name": ({"tools": [{"type": "function", "function": {}}]}, "missing field `name`"),
    "tool of another type": ({"tools": [{"type": "retrieval"}]}, "unknown variant `retrieval`"),
    "tool name": ({"tools": [tool("a b")]}, "Invalid 'tools[0].function.name'"),
    "tool names equal": ({"tools": [tool(), tool()]}, "Tool names must be unique"),
    "tool schema": ({"tools": [tool(parameters={"type": "string"})]}, "Invalid schema for function 'read'"),
    "tool strict type": (
        {"tools": [tool(strict=True, parameters={"type": "object", "properties": {"a": {"type": "date"}}})]},
        "unknown variant `date`",
    ),
    "choice required, thinking": (
        {"tools": [tool()], "tool_choice": "required"}, "Thinking mode does not support this tool_choice"
    ),
    "choice named, thinking": (
        {"tools": [tool()], "tool_choice": FORCED}, "Thinking mode does not support this tool_choice"
    ),
    "choice of an unknown function": (
        {"tools": [tool("other")], "tool_choice": FORCED, **OFF}, "no function named 'read' was specified"
    ),
    "choice word": ({"tools": [tool()], "tool_choice": "maybe"}, "expected one of `none`, `auto`, `required`"),
    "json not mentioned": ({"response_format": {"type": "json_object"}, **user("Hi")}, "must contain the word 'json'"),
    "json_schema without": ({"response_format": {"type": "json_schema"}}, "missing field `json_schema`"),
    "format unknown": ({"response_format": {"type": "xml"}}, "unknown variant `xml`"),
    "regex without": ({"response_format": {"type": "regex"}}, "missing field `regex`"),
}  # fmt: skip

VALID = json.dumps({"model": "deepseek-flash", "messages": [USER]}).encode()
BODIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "EOF while parsing a value"),
    "broken": (VALID[:-1], "EOF while parsing an object"),
    "trailing text": (VALID + b" x", "trailing characters"),
    "bad UTF-8": (b'{"model": "\xff\xfe"}', "invalid unicode code point"),
    "lone surrogate": (b'{"model": "a", "messages": [{"role": "user", "content": "\\ud800"}]}', "hex escape"),
    "NaN": (b'{"model": "a", "messages": [], "temperature": NaN}', "expected value"),
    "deep nesting": (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "recursion limit exceeded"),
    "very deep nesting": (b"[" * 100_000, "recursion limit exceeded"),
    "array": (b"[]", "must be a JSON object (invalid request body: invalid length 0, expected struct Chat"),
    "null": (b"null", "must be a JSON object (invalid request body: "),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
async def test_accepted(rig: Rig, name: str) -> None:
    rig.play("Hm.</think>Hi")
    response = await rig.chat(**({"messages": [USER]} | ACCEPTED[name]))
    assert response.status == 200, await response.text()
    assert rig.submit.last.ended and rig.metrics.conversion_errors == []


@pytest.mark.parametrize("name", NOT_YET)
async def test_not_served_yet(rig: Rig, name: str) -> None:
    fields, named, param = NOT_YET[name]
    error = await refused(rig, await rig.chat(**({"messages": [USER]} | fields)))
    assert named in error["message"]
    assert (error["code"], error["param"]) == ("unsupported_feature", param)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, OFF])
@pytest.mark.parametrize("choice", ["required", FORCED])
async def test_a_call_where_there_is_nothing_to_call(rig: Rig, fields: dict[str, Any], choice: Any) -> None:
    """An answer without a call would not be what was asked for."""
    response = await rig.chat(tool_choice=choice, **fields)
    error = (await response.json())["error"]
    assert response.status == 400 and "there are no `tools` to call" in error["message"] and not rig.submit.tickets
    assert (error["code"], error["param"]) == ("invalid_request_error", "tool_choice")


@pytest.mark.parametrize("name", REJECTED)
async def test_rejected(rig: Rig, name: str) -> None:
    fields, message = REJECTED[name]
    error = await refused(rig, await rig.chat(**({"messages": [USER]} | fields)))
    assert message in error["message"] and error["code"] == "invalid_request_error"
    if error["param"] is not None:  # where it is known; the library does not tell it
        assert error["param"] in ({"messages"} | fields.keys()) and f"(in `{error['param']}`)" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"), ({"max_tokens": "1"}, "max_tokens"), ({"xyzzy": 1, "stop": 5}, "stop"),
        ({"max_completion_tokens": "1"}, "max_tokens"), ({"thinking": True, "tools": [tool()]}, "thinking"),
        ({"messages": ...}, None), ({f"a{number}": 1 for number in range(100)} | {"seed": "1"}, None),
    ],
)  # fmt: skip
async def test_the_field_at_fault_is_named(rig: Rig, fields: dict[str, Any], param: str | None) -> None:
    """As far as it is looked for: a body with an endless number of fields shall not cost more than others."""
    error = await refused(rig, await rig.chat(**fields))
    assert error["param"] == param


@pytest.mark.parametrize("name", BODIES)
async def test_bodies(rig: Rig, name: str) -> None:
    body, message = BODIES[name]
    error = await refused(rig, await rig.post("/v1/chat/completions", body))
    assert message in error["message"]


@pytest.mark.parametrize("field", ["logit_bias", "logprobs", "modalities"])
async def test_what_the_library_refuses_comes_first(rig: Rig, field: str) -> None:
    extension = {"logit_bias": {"5": 1}, "logprobs": True, "modalities": ["audio"]}[field]
    error = await refused(rig, await rig.chat(**{field: extension}, n=2))
    assert "only n = 1 is supported" in error["message"]


@pytest.mark.parametrize("body", [b'"\\ud800"', b"1e999", b"[" * 300 + b"]" * 300, b"123456789012345678901234567890"])
async def test_odd_values_beside_a_rewritten_field(rig: Rig, body: bytes) -> None:
    odd = b'{"max_completion_tokens": 5, "odd": ' + body + b", " + VALID[1:]
    response = await rig.post("/v1/chat/completions", odd)
    assert response.status in (200, 400), await response.text()


async def refused(rig: Rig, response: Any) -> dict[str, Any]:
    """The error of a refusal, whose envelope is checked; nothing may have reached the scheduler."""
    assert response.status == 400 and response.content_type == "application/json"
    body = await response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert rig.submit.tickets == [] and rig.metrics.conversion_errors == ["/v1/chat/completions"]
    error: dict[str, Any] = body["error"]
    return error

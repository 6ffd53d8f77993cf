"""The published Python SDKs against a real server process, from prompt to reply. Their errors: `tests/api`."""

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.clients import process, replies

pytestmark = pytest.mark.clients

MODEL = "deepseek-v4.1-flash"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = replies.call("weather", {"city": "Łódź"})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose script thinks, answers, calls a tool, or runs on."""
    rules = [
        {"match": "Łódź?", "absent": "<tool_result>", "reasoning": "I ask.", "reply": CALL},
        {"match": "<tool_result>", "reasoning": "I see.", "reply": "It rains."},
        {"match": "Count", "reasoning": "", "reply": "one two three four five six seven eight nine ten"},
        {"reasoning": "A greeting.", "reply": "Hello, wide world."},
    ]
    with process.serve_script(tmp_path_factory.mktemp("sdks"), rules) as url:
        yield url


@pytest.fixture(scope="module")
def chat(url: str) -> Iterator[openai.OpenAI]:
    """The OpenAI SDK, with retries off so that a fault shows."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def messages(url: str) -> Iterator[anthropic.Anthropic]:
    """The Anthropic SDK."""
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=30) as client:
        yield client


def test_chat_whole(chat: openai.OpenAI) -> None:
    """One reply with reasoning, answer and usage."""
    reply = chat.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert reply.choices[0].message.content == "Hello, wide world."
    assert reply.choices[0].message.reasoning_content == "A greeting."  # type: ignore[attr-defined]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_chat_stream_folds_to_the_whole(chat: openai.OpenAI) -> None:
    """The stream's pieces, joined, are the whole reply; usage comes last."""
    whole = chat.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    stream = chat.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(bool(piece) for piece in pieces) > 2
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


def test_chat_limit(chat: openai.OpenAI) -> None:
    """max_tokens ends the reply with reason `length` and is what usage counts."""
    reply = chat.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count"}],
        max_tokens=4,
        extra_body={"thinking": {"type": "disabled"}},
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4


def test_chat_tool_round_trip(chat: openai.OpenAI) -> None:
    """A call comes out with its arguments as JSON; its result goes back in."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    history: list[dict[str, object]] = [{"role": "user", "content": "Rain in Łódź?"}]
    reply = chat.chat.completions.create(model=MODEL, messages=history, tools=tools)  # type: ignore[arg-type]
    assert reply.choices[0].finish_reason == "tool_calls"
    (made,) = reply.choices[0].message.tool_calls or []
    assert json.loads(made.function.arguments) == {"city": "Łódź"}  # type: ignore[union-attr]
    history += [
        reply.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.id, "content": "rain"},
    ]
    reply = chat.chat.completions.create(model=MODEL, messages=history, tools=tools)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "It rains."


def test_messages_whole(messages: anthropic.Anthropic) -> None:
    """Thinking and text as blocks, a stop reason, usage."""
    reply = messages.messages.create(
        model=MODEL,
        max_tokens=100,
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": "Hi"}],
    )
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert reply.content[1].text == "Hello, wide world."  # type: ignore[union-attr]
    assert reply.stop_reason == "end_turn"
    assert reply.usage.output_tokens > 4


def test_messages_stream(messages: anthropic.Anthropic) -> None:
    """The SDK's own accumulation of the stream gives the whole reply."""
    with messages.messages.stream(model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "Hi"}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello, wide world."
    assert final.stop_reason == "end_turn"


def test_messages_tool_round_trip(messages: anthropic.Anthropic) -> None:
    """A call is a `tool_use` block with its input as an object; its result goes back in."""
    tools = [{"name": "weather", "input_schema": WEATHER}]
    history: list[dict[str, object]] = [{"role": "user", "content": "Rain in Łódź?"}]

    def ask() -> anthropic.types.Message:
        return messages.messages.create(model=MODEL, max_tokens=500, messages=history, tools=tools)  # type: ignore

    reply = ask()
    assert reply.stop_reason == "tool_use"
    made = next(block for block in reply.content if block.type == "tool_use")
    assert made.input == {"city": "Łódź"}
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "rain"}
    history += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]},
        {"role": "user", "content": [result]},
    ]
    reply = ask()
    assert [block.text for block in reply.content if block.type == "text"] == ["It rains."]

"""The published Python SDKs against a real server process, from prompt to reply. Their errors: `tests/api`."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from dsuf.checkpoint.forms import NANO
from tests.clients import process, replies

pytestmark = pytest.mark.clients

MODEL = "deepseek-v4.1-flash"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER}]
MESSAGE_TOOLS: list[Any] = [{"name": "weather", "input_schema": WEATHER}]
CALL = replies.call("weather", {"city": "Łódź"})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose script thinks, answers, calls a tool, or runs on."""
    rules = [
        {"match": "Łódź?", "absent": "<tool_result>", "reasoning": "I ask.", "reply": CALL},
        {"match": "<tool_result>", "reasoning": "I see.", "reply": "It rains."},
        {"match": "Once upon", "reply": " a time there was a king."},
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


def test_messages_tool_runner(messages: anthropic.Anthropic) -> None:
    """The SDK's own loop, which asks for a kept thread first, ends with the answer to what the tool gave."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        return f"{city}: rain"

    asked: list[Any] = [{"role": "user", "content": "Rain in Łódź?"}]
    runner = messages.beta.messages.tool_runner(model=MODEL, max_tokens=500, messages=asked, tools=[weather])
    assert [reply.stop_reason for reply in runner] == ["tool_use", "end_turn"]


def test_messages_stream_helper_with_a_call(messages: anthropic.Anthropic) -> None:
    """The helper's events build the call's input; the final message holds it whole."""
    asked: list[Any] = [{"role": "user", "content": "Rain in Łódź?"}]
    with messages.messages.stream(model=MODEL, max_tokens=500, messages=asked, tools=MESSAGE_TOOLS) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == final.content[-1].input == {"city": "Łódź"}  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"


def test_messages_count_tokens(messages: anthropic.Anthropic) -> None:
    """What is counted beforehand is what the reply's usage says."""
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    counted = messages.messages.count_tokens(model=MODEL, messages=asked, tools=MESSAGE_TOOLS, system="Be brief.")
    reply = messages.messages.create(
        model=MODEL, messages=asked, tools=MESSAGE_TOOLS, system="Be brief.", max_tokens=99
    )
    assert counted.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)


def test_chat_stream_helper_with_a_call(chat: openai.OpenAI) -> None:
    """The helper's events end with the call, its arguments parsed."""
    asked: list[Any] = [{"role": "user", "content": "Rain in Łódź?"}]
    with chat.chat.completions.stream(model=MODEL, messages=asked, tools=CHAT_TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [("weather", {"city": "Łódź"})]
    assert final.choices[0].finish_reason == "tool_calls"


def test_responses_whole_and_stream(chat: openai.OpenAI) -> None:
    """The stream's helper accumulates to what the whole reply is."""
    whole = chat.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
    assert whole.output_text == "Hello, wide world." and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    with chat.responses.stream(model=MODEL, input="Hi", instructions="Be kind.") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text and len(pieces) > 2
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_responses_limit(chat: openai.OpenAI) -> None:
    """A response at its limit is incomplete, and says why."""
    reply = chat.responses.create(model=MODEL, input="Count", max_output_tokens=4, reasoning={"effort": "none"})
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None and reply.usage.output_tokens == 4


def test_responses_tool_round_trip(chat: openai.OpenAI) -> None:
    """A call comes out as an item; it goes back in with its result behind it, and nothing was kept in between."""
    items: list[Any] = [{"role": "user", "content": "Rain in Łódź?"}]
    reply = chat.responses.create(model=MODEL, input=items, tools=RESPONSE_TOOLS)
    call = reply.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Łódź"}
    items += [item.model_dump(exclude_none=True) for item in reply.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    reply = chat.responses.create(model=MODEL, input=items, tools=RESPONSE_TOOLS)
    assert reply.output_text == "It rains."


def test_responses_input_tokens(chat: openai.OpenAI) -> None:
    """What is counted beforehand is what the reply's usage says."""
    counted = chat.responses.input_tokens.count(model=MODEL, input="Hi", tools=RESPONSE_TOOLS)
    reply = chat.responses.create(model=MODEL, input="Hi", tools=RESPONSE_TOOLS)
    assert reply.usage is not None and counted.input_tokens == reply.usage.input_tokens


def test_completions(chat: openai.OpenAI) -> None:
    """Raw text, whole and streamed, cut at a stop string."""
    whole = chat.completions.create(model=MODEL, prompt="Once upon", max_tokens=50, stop=" king")
    stream = chat.completions.create(model=MODEL, prompt="Once upon", max_tokens=50, stop=" king", stream=True)
    assert whole.choices[0].text == "".join(c.choices[0].text for c in stream) == " a time there was a"
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.full
@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="no shipped model in dsuf/nano")
def test_the_shipped_model_answers_the_same_in_every_protocol(tmp_path: Path) -> None:
    """Greedily, without thinking: one prompt, four ways to send it, each whole and streamed."""
    text = 'The list says:\n"amber": ninety apples\n"mauve": 1742 stones\nWhat does the line "mauve" say?'
    asked: list[Any] = [{"role": "user", "content": text}]
    off, limit = {"thinking": {"type": "disabled"}}, 24
    with process.serve(tmp_path / "server.log") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
        other = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=120)
        greedy: dict[str, Any] = {"model": MODEL, "temperature": 0}
        reply = client.chat.completions.create(messages=asked, max_tokens=limit, extra_body=off, **greedy)
        answers = [reply.choices[0].message.content]
        with client.chat.completions.stream(messages=asked, max_tokens=limit, extra_body=off, **greedy) as chunks:
            answers.append(chunks.get_final_completion().choices[0].message.content)
        message = other.messages.create(
            model=MODEL, messages=asked, max_tokens=limit, extra_body={"temperature": 0} | off
        )
        answers.append("".join(block.text for block in message.content if block.type == "text"))
        none: Any = {"effort": "none"}
        response = client.responses.create(input=asked, max_output_tokens=limit, reasoning=none, **greedy)
        answers.append(response.output_text)
        prompt = tokenize(url, {"messages": asked, **off})
        raw = client.completions.create(prompt=prompt, max_tokens=limit, **greedy)
        answers.append(raw.choices[0].text)
    assert answers[0] and answers == answers[:1] * 5


class Item(pydantic.BaseModel):
    """What a reply is parsed into: more than a model would write by itself."""

    name: Literal["amber", "quince"]
    count: int = pydantic.Field(ge=10, le=99)
    open: bool
    marks: list[Literal["a", "b"]] = pydantic.Field(max_length=3)


class Weather(pydantic.BaseModel):
    """Arguments of a call."""

    city: Literal["Oslo", "Łódź"]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the shipped model."""
    if not (NANO / "config.json").is_file():
        pytest.skip("no shipped model in dsuf/nano")
    with process.serve(tmp_path_factory.mktemp("nano") / "server.log", "--engine", "reference") as url:
        yield url


@pytest.mark.full
@pytest.mark.parametrize("thinks", [False, True])
def test_parse_with_a_schema_on_the_shipped_model(nano: str, thinks: bool) -> None:
    """The SDK's own parsing gives objects of the classes that were asked for, in both protocols, whole and streamed."""
    asked: list[Any] = [{"role": "user", "content": 'Write a JSON object: "name" is "amber" and "count" is 17.'}]
    limit = 400
    with openai.OpenAI(base_url=f"{nano}/v1", api_key="any", max_retries=0, timeout=120) as client:
        chat: Any = {"model": MODEL, "messages": asked, "response_format": Item, "max_tokens": limit, "seed": 4,
                     "extra_body": {"thinking": {"type": "enabled" if thinks else "disabled"}}}  # fmt: skip
        whole = client.chat.completions.parse(**chat)
        with client.chat.completions.stream(**chat) as stream:
            streamed = stream.get_final_completion()
        effort: Any = {"effort": "low" if thinks else "none"}
        response = client.responses.parse(
            model=MODEL, input=asked, text_format=Item, max_output_tokens=limit, reasoning=effort
        )
    assert isinstance(whole.choices[0].message.parsed, Item), whole
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert isinstance(response.output_parsed, Item), response


@pytest.mark.full
@pytest.mark.parametrize("thinks", [False, True])
def test_parse_of_messages_on_the_shipped_model(nano: str, thinks: bool) -> None:
    """Of a class without bounds on its lists: Anthropic's SDK sends no bounds, and the model finds no end by itself."""
    asked: list[Any] = [{"role": "user", "content": "Write quicksort in Python."}]
    thinking: Any = {"type": "enabled" if thinks else "disabled"}
    with anthropic.Anthropic(base_url=nano, api_key="any", max_retries=0, timeout=120) as client:
        reply = client.messages.parse(
            model=MODEL, messages=asked, output_format=Weather, max_tokens=1000, thinking=thinking
        )
    assert isinstance(reply.parsed_output, Weather), reply


@pytest.mark.full
def test_required_calls_on_the_shipped_model(nano: str) -> None:
    """A tool of a class is called where a call is asked for, however little the question has to do with it."""
    asked: list[Any] = [{"role": "user", "content": "Write quicksort in Python."}]
    off: Any = {"thinking": {"type": "disabled"}}
    tools: Any = [{"name": "weather", "input_schema": Weather.model_json_schema()}]
    with openai.OpenAI(base_url=f"{nano}/v1", api_key="any", max_retries=0, timeout=120) as client:
        reply = client.chat.completions.parse(
            model=MODEL, messages=asked, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required",
            extra_body=off, max_tokens=200, temperature=0,
        )  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with anthropic.Anthropic(base_url=nano, api_key="any", max_retries=0, timeout=120) as other:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            message = other.messages.create(
                model=MODEL, messages=asked, tools=tools, max_tokens=200, tool_choice=choice, extra_body=off
            )
            assert message.stop_reason == "tool_use"
            assert all(Weather(**block.input) for block in message.content if block.type == "tool_use")


def tokenize(url: str, body: dict[str, Any]) -> list[int]:
    """The ids that a chat renders to."""
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/tokenize", data, headers), timeout=30) as reply:
        ids: list[int] = json.load(reply)["tokens"]
    return ids

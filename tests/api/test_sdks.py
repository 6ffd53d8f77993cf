"""The official clients of both protocols against the server."""

import anthropic
import openai
import pytest

from dsuf.errors import EngineFailed, QueueFull, Unavailable
from dsuf.types import StepResult
from tests.api.rig import MODEL, Rig
from tests.api.test_generation import CALL, CHAT_TOOLS, MESSAGE_TOOLS

MESSAGES = [{"role": "user", "content": "Say hi."}]


def openai_client(rig: Rig, path: str = "/v1", retries: int = 0) -> openai.AsyncOpenAI:
    """OpenAI's client."""
    return openai.AsyncOpenAI(base_url=rig.url + path, api_key="sk-local", max_retries=retries)


def anthropic_client(rig: Rig, path: str = "") -> anthropic.AsyncAnthropic:
    """Anthropic's client."""
    return anthropic.AsyncAnthropic(base_url=rig.url + path, api_key="sk-local", max_retries=0)


@pytest.mark.parametrize("path", ["/v1", "/v1/", "", "/beta"])
async def test_openai_whole(rig: Rig, path: str) -> None:
    rig.play("Hm.</think>Hi there")
    async with openai_client(rig, path) as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES], max_completion_tokens=9
        )
    assert reply.choices[0].message.content == "Hi there"
    assert reply.choices[0].message.reasoning_content == "Hm."
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.computed_tokens == reply.usage.prompt_tokens
    assert reply._request_id == reply.id.removeprefix("chatcmpl-")
    assert rig.submit.last.turn.sampling.max_tokens == 9


async def test_openai_stream_with_tools(rig: Rig) -> None:
    rig.play("I look.</think>" + CALL)
    async with openai_client(rig) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "read"
    assert "".join(call.function.arguments for call in calls) == '{"path": "/etc/hosts"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls" and chunks[-1].usage.completion_tokens > 10


async def test_openai_errors(rig: Rig) -> None:
    async with openai_client(rig) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
        assert refused.value.code == "unsupported_feature" and refused.value.param == "logprobs"
        rig.submit.refusal = QueueFull("full")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
        rig.submit.refusal = None
        rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=(5,)), EngineFailed("the engine failed")]
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            async for _ in stream:
                pass


async def test_openai_retries_an_overload(rig: Rig) -> None:
    rig.play("Hm.</think>Hi")
    rig.submit.refusal = Unavailable("starting", retry_after_s=1)
    async with openai_client(rig, retries=2) as client:
        pending = client.chat.completions.create(model=MODEL, messages=MESSAGES)
        original = rig.submit.submit

        def refuse_once(turn):  # type: ignore[no-untyped-def]
            try:
                return original(turn)
            finally:
                rig.submit.refusal = None

        rig.submit.submit = refuse_once  # type: ignore[method-assign]
        assert (await pending).choices[0].message.content == "Hi"
    assert [status for _, status in rig.metrics.responses] == [503, 200]


async def test_openai_models(rig: Rig) -> None:
    async with openai_client(rig) as client:
        names = [model.id async for model in client.models.list()]
        assert names[0] == MODEL and (await client.models.retrieve(names[3])).id == names[3]


@pytest.mark.parametrize("path", ["", "/anthropic"])
async def test_anthropic_whole(rig: Rig, path: str) -> None:
    rig.play("I look.</think>" + CALL)
    async with anthropic_client(rig, path) as client:
        reply = await client.messages.create(
            model=MODEL, messages=MESSAGES, max_tokens=99, tools=MESSAGE_TOOLS, system="Be brief."
        )
        counted = await client.messages.count_tokens(
            model=MODEL, messages=MESSAGES, tools=MESSAGE_TOOLS, system="Be brief."
        )
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    assert reply.content[2].input == {"path": "/etc/hosts"} and reply.stop_reason == "tool_use"
    assert counted.input_tokens == reply.usage.input_tokens and reply._request_id == reply.id.removeprefix("msg_")


async def test_anthropic_stream(rig: Rig) -> None:
    rig.play("Hm.</think>Hi", " there", " END of it")
    async with (
        anthropic_client(rig) as client,
        client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=99, stop_sequences=["END"]) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
        reply = await stream.get_final_message()
    assert text == "Hi there " and reply.stop_reason == "stop_sequence" and reply.stop_sequence == "END"
    assert rig.submit.last.cancelled.is_set() and not rig.submit.last.ended


async def test_anthropic_errors(rig: Rig) -> None:
    async with anthropic_client(rig) as client:
        with pytest.raises(anthropic.BadRequestError, match="server tools are not supported"):
            tools = [{"type": "web_search_20250305", "name": "web_search"}]
            await client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=9, tools=tools)
        rig.submit.refusal = QueueFull("full")
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=9)
        rig.submit.refusal = None
        rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=(5,)), EngineFailed("the engine failed")]
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            async with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=9) as stream:
                await stream.get_final_message()

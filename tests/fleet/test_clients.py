"""The published SDK and the released client through the balancer of a fleet."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from dsuf.trial.fleet import TrialFleet
from tests.clients import dsh, replies
from tests.fleet.conftest import Start, skip_without_programs
from tests.fleet.rig import NO_THINKING, TOTALS, find_ports, opening

pytestmark = [pytest.mark.full, pytest.mark.clients, pytest.mark.needs_redis, pytest.mark.timeout(300)]
MODEL = "deepseek-flash"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RULES = [
    {"absent": [replies.WITH_TOOLS, "Oslo"], "reply": "A title"},
    {"match": ["<tool_result>", "mauve-1742"], "reasoning": "Now I know.", "reply": "The note says mauve-1742."},
    {"match": ["<tool_result>", "Oslo"], "reasoning": "I see.", "reply": "It rains."},
    {"match": "Oslo", "reasoning": "I ask.", "reply": replies.call("weather", {"city": "Oslo"})},
    {"absent": "<tool_result>", "reasoning": "I read.", "reply": replies.call("read", {"file_path": "note.txt"})},
]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[TrialFleet]:
    """Three nodes that follow a script."""
    skip_without_programs()
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"rules": RULES}))
    fleet = TrialFleet(3, tmp_path, port=find_ports(), flags=("--engine", "scripted", "--script", str(script)))
    try:
        fleet.start()
        yield fleet
    finally:
        for program in fleet.programs:
            program.kill()


async def test_a_conversation_with_the_sdk(start: Start) -> None:
    """Streams and whole replies in turn, node after node: usage comes and adds up, later turns find their beginning."""
    fleet = await asyncio.to_thread(start, 3)
    messages: list[dict[str, str]] = [{"role": "user", "content": opening(1, 200)}]
    peers = 0
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0) as client:
        for turn in range(6):
            options = {"stream": True, "stream_options": {"include_usage": True}} if turn % 2 else {}
            reply = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=5, extra_body={"thinking": NO_THINKING}, **options
            )  # type: ignore[call-overload]
            text, usage = "", None
            if turn % 2:
                async for chunk in reply:
                    usage = chunk.usage or usage
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            else:
                text, usage = reply.choices[0].message.content, reply.usage
            details = usage.prompt_tokens_details.model_dump()
            assert sum(details[name] for name in TOTALS) == usage.prompt_tokens
            assert details["cached_tokens"] == usage.prompt_tokens - details["computed_tokens"]
            assert turn == 0 or details["cached_tokens"] > 200, details
            peers += details["peer_tokens"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Go on {turn}."}]
            await asyncio.sleep(0.3)
    assert peers > 200


def test_tools_with_the_sdk(scripted: TrialFleet) -> None:
    """The call comes from one node, the answer to its result from another."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    messages: list[dict[str, object]] = [{"role": "user", "content": "Weather in Oslo?"}]
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client:
        asked = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)  # type: ignore[call-overload]
        [call] = asked.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        messages += [asked.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        told = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)  # type: ignore[call-overload]
    assert told.choices[0].message.content == "It rains."


def test_the_released_client(scripted: TrialFleet, tmp_path: Path) -> None:
    """A tool round trip, whose requests go to different nodes."""
    try:
        program = dsh.install(dsh.NEWEST, dsh.find_cache())
    except dsh.InstallError as error:
        pytest.skip(str(error))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text("the word is mauve-1742\n")
    outcome = dsh.run(program, dsh.NEWEST, scripted.url, "What does note.txt say?", folder=folder)
    assert (outcome.status, outcome.answer) == (0, "The note says mauve-1742."), outcome.errors
    served = [node.name for node in scripted.nodes if '"prompt_tokens":' in node.log.read_text()]
    assert len(served) > 1, served

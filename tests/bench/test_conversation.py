"""Conversations of the load generator: growing, repeatable, well-formed."""

import json
import random

from bench.chat import Reply
from bench.conversation import Conversation, Shape

CALL = {0: {"id": "call-1", "name": "read_file", "arguments": "{}"}}


def test_each_turn_repeats_all_before() -> None:
    conversation = Conversation(Shape(turns=5), random.Random(1))
    before: list[object] = []
    while not conversation.over:
        body = conversation.ask()
        assert body == conversation.ask()  # asked again, the same
        assert body["messages"][: len(before)] == before
        assert body["messages"][-1]["role"] == "user"
        before = [*body["messages"], {"role": "assistant", "content": f"reply {conversation.turn}"}]
        conversation.hear(Reply(content=f"reply {conversation.turn}"))
    assert conversation.turn == 5


def test_a_call_is_answered() -> None:
    conversation = Conversation(Shape(tools_share=1.0), random.Random(1))
    assert {tool["function"]["name"] for tool in conversation.ask()["tools"]} >= {"read_file"}
    conversation.hear(Reply(calls=CALL))
    said, result = conversation.ask()["messages"][-2:]
    assert said["tool_calls"][0]["function"] == {"name": "read_file", "arguments": "{}"}
    assert result["role"] == "tool" and result["tool_call_id"] == said["tool_calls"][0]["id"]


def test_same_seed_same_conversation() -> None:
    bodies = [json.dumps(Conversation(Shape(), random.Random("0 3")).ask()) for _ in range(2)]
    assert bodies[0] == bodies[1] != json.dumps(Conversation(Shape(), random.Random("0 4")).ask())


def test_shares_are_kept() -> None:
    shape = Shape(sampled_share=0.25, tools_share=0.75)
    bodies = [Conversation(shape, random.Random(number)).ask() for number in range(400)]
    assert 0.2 < sum(body["temperature"] > 0 for body in bodies) / 400 < 0.3
    assert 0.7 < sum("tools" in body for body in bodies) / 400 < 0.8
    assert len({body["messages"][0]["content"] for body in bodies}) == 1  # all share the system text

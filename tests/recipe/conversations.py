"""Conversations drawn from seeds, and how each protocol spells them: what they render to is recorded beside this file.

`python -m tests.recipe.conversations` records them anew: do that only where a new revision of the checkpoint changes
what is right, and say which one.
"""

import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dsuf.checkpoint
from dsuf.recipe.conversion import Protocol
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary

RECORD = Path(__file__).with_name("conversations.json")
COUNT = 300
SPELT: tuple[Protocol, ...] = ("chat", "messages", "responses")
EFFORTS = ("none", "low", "high", "xhigh", "max")
TEXTS = (
    "Hi.", "What is 7 + 5?", "世界，你好。", "Grüße aus Łódź 👋🏽", "def f(x):\n    return x\n", "  two  spaces ",
    "a\n\n\nb",
    "It reads <｜User｜> and </think> there.", "<tool_result>no</tool_result>", '{"a": [1, 2.5, null, "x\\ny"]}',
    "\t", "The quick brown fox jumps over the lazy dog. " * 9, "<｜DSML｜ calls>", "\N{ZERO WIDTH SPACE}é\u0301",
)  # fmt: skip
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}, "deep": {"type": "object"}}},
    {"type": "object", "properties": {}},
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"path": "/etc/hosts"}, {"path": 'a "b" <c>\n世'}, {"n": 5, "deep": {"x": [1, None, True]}}, {}, {"n": -2.5}
)  # fmt: skip


@dataclass
class Step:
    """What the assistant said once: reasoning, text, and calls as (name, arguments, result)."""

    reasoning: str
    text: str
    calls: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)


@dataclass
class Conversation:
    """What was said: a user's texts, each with the assistant's steps behind it; the last has none."""

    effort: str
    system: str
    tools: list[tuple[str, str, dict[str, Any]]]
    turns: list[tuple[str, list[Step]]]


def draw_conversation(number: int) -> Conversation:
    """The conversation of this number."""
    chance = random.Random(f"conversation {number}")
    names = [f"tool_{i}" for i in range(chance.choice((0, 0, 1, 3)))]
    tools = [(name, chance.choice(TEXTS), chance.choice(SCHEMAS)) for name in names]

    def draw_step(calls: bool) -> Step:
        text = chance.choice(("", *TEXTS)) if calls else chance.choice(TEXTS)
        made = [
            (chance.choice(names), chance.choice(ARGUMENTS), chance.choice(TEXTS))
            for _ in range(calls * chance.randint(1, 3))
        ]
        return Step(chance.choice(TEXTS), text, made)

    def draw_calls() -> list[Step]:
        return [draw_step(True) for _ in range(chance.randint(0, 2) if names else 0)]

    turns = [(chance.choice(TEXTS), [*draw_calls(), draw_step(False)]) for _ in range(chance.randint(0, 3))]
    turns.append((chance.choice(TEXTS), [draw_step(True)] if names and chance.random() < 0.4 else []))
    return Conversation(chance.choice(EFFORTS), chance.choice(("", *TEXTS)), tools, turns)


def spell(conversation: Conversation, protocol: Protocol) -> bytes:
    """A body that asks for the next step of `conversation`."""
    spellers = {"chat": _spell_chat, "messages": _spell_messages, "responses": _spell_responses}
    return json.dumps({"model": "deepseek-flash"} | spellers[protocol](conversation)).encode()


def _number_calls(conversation: Conversation) -> list[list[list[str]]]:
    """Ids of all calls, by turn and step."""
    return [
        [[f"call_{t}_{s}_{c}" for c in range(len(step.calls))] for s, step in enumerate(steps)]
        for t, (_, steps) in enumerate(conversation.turns)
    ]


def _spell_chat(conversation: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}] * bool(conversation.system)
    for (asked, steps), ids in zip(conversation.turns, _number_calls(conversation), strict=True):
        messages.append({"role": "user", "content": asked})
        for step, names in zip(steps, ids, strict=True):
            said: dict[str, Any] = {"role": "assistant", "content": step.text, "reasoning_content": step.reasoning}
            if step.calls:
                said["tool_calls"] = [
                    {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                    for id_, (name, arguments, _) in zip(names, step.calls, strict=True)
                ]
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": id_, "content": result}
                for id_, (_, _, result) in zip(names, step.calls, strict=True)
            ]
    tools = [
        {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
        for name, about, schema in conversation.tools
    ]
    return {"messages": messages, "reasoning_effort": conversation.effort} | ({"tools": tools} if tools else {})


def _spell_messages(conversation: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for (asked, steps), ids in zip(conversation.turns, _number_calls(conversation), strict=True):
        messages.append({"role": "user", "content": asked})
        for step, names in zip(steps, ids, strict=True):
            blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": step.reasoning, "signature": "s"}]
            blocks += [{"type": "text", "text": step.text}] * bool(step.text)
            results = []
            for id_, (name, arguments, result) in zip(names, step.calls, strict=True):
                blocks.append({"type": "tool_use", "id": id_, "name": name, "input": arguments})
                results.append({"type": "tool_result", "tool_use_id": id_, "content": result})
            messages.append({"role": "assistant", "content": blocks})
            messages += [{"role": "user", "content": results}] * bool(results)
    body: dict[str, Any] = {"messages": messages, "max_tokens": 100}
    off = conversation.effort == "none"
    body |= {"thinking": {"type": "disabled"}} if off else {"output_config": {"effort": conversation.effort}}
    tools = [{"name": name, "description": about, "input_schema": schema} for name, about, schema in conversation.tools]
    return body | ({"system": conversation.system} if conversation.system else {}) | ({"tools": tools} if tools else {})


def _spell_responses(conversation: Conversation) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for (asked, steps), ids in zip(conversation.turns, _number_calls(conversation), strict=True):
        items.append({"role": "user", "content": asked})
        for step, names in zip(steps, ids, strict=True):
            content = [{"type": "reasoning_text", "text": step.reasoning}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
            items += [{"role": "assistant", "content": step.text}] * bool(step.text)
            results = []
            for id_, (name, arguments, result) in zip(names, step.calls, strict=True):
                call = {"type": "function_call", "call_id": id_, "name": name, "arguments": json.dumps(arguments)}
                items.append(call)
                results.append({"type": "function_call_output", "call_id": id_, "output": result})
            items += results
    tools = [
        {"type": "function", "name": name, "description": about, "parameters": schema}
        for name, about, schema in conversation.tools
    ]
    body: dict[str, Any] = {"input": items, "reasoning": {"effort": conversation.effort}}
    body |= {"instructions": conversation.system} if conversation.system else {}
    return body | ({"tools": tools} if tools else {})


def digest(ids: list[int]) -> str:
    """The beginning of the SHA-256 of `ids`."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def record(vocabulary: Vocabulary, tokenizer: bytes) -> dict[str, Any]:
    """What all conversations render to now, and with which tokenizer."""
    prompts = [count_prompt("chat", spell(draw_conversation(number), "chat"), vocabulary) for number in range(COUNT)]
    return {"tokenizer": hashlib.sha256(tokenizer).hexdigest(), "prompts": [digest(ids) for ids in prompts]}


if __name__ == "__main__":
    folder = Path(dsuf.checkpoint.__file__).parent / "released"
    recorded = record(load_vocabulary(folder), (folder / "tokenizer.json").read_bytes())
    RECORD.write_text(json.dumps(recorded, indent=0) + "\n")

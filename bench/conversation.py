"""Conversations as agents hold them: a system text that many share, then turns that each repeat all before them."""

import random
from typing import Any

import msgspec

from bench.chat import Reply

_TEXT = (
    "the file test server reads writes a line of code and then calls function with value where error list "
    "path node cache token step engine while return if not none true each key page row time stream"
)
_WORDS = _TEXT.split()
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name, text in (("read_file", "Read a file."), ("list_folder", "List the files of a folder."))
]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What conversations are like. Lengths are words, about as many tokens; shares are parts of the conversations."""

    system_words: int = 300
    prompt_words: int = 60
    turns: int = 4
    max_tokens: int = 64
    tools_share: float = 0.3
    sampled_share: float = 0.5
    thinking_share: float = 0.0
    model: str = "deepseek-flash"


class Conversation:
    """One session: `ask` gives the next request's body, `hear` takes its reply in. Drawn from `chance` alone."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self.turn = 0
        self._shape = shape
        self._chance = chance
        self._fields = self._draw_fields()
        shared = random.Random(shape.system_words)  # the same text in every conversation
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": _write(shared, shape.system_words)}]
        self._answers: list[dict[str, Any]] = []

    @property
    def over(self) -> bool:
        """Whether the last turn was had."""
        return self.turn >= self._shape.turns

    def ask(self) -> dict[str, Any]:
        """The body of the next request: all messages so far, and a new one, or results of the calls in the last reply.

        Asked again without a reply in between, it is the same.
        """
        if not self._answers:
            words = max(1, round(self._chance.expovariate(1 / self._shape.prompt_words)))
            self._answers = [{"role": "user", "content": _write(self._chance, words)}]
        return self._fields | {"messages": [*self._messages, *self._answers]}

    def hear(self, reply: Reply) -> None:
        """Take a whole reply in."""
        said: dict[str, Any] = {"role": "assistant", "content": reply.content}
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in reply.calls.values()
        ]
        if calls:
            said["tool_calls"] = calls
        self._messages += [*self._answers, said]
        words = self._shape.prompt_words
        self._answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": _write(self._chance, words)} for call in calls
        ]
        self.turn += 1

    def _draw_fields(self) -> dict[str, Any]:
        """What stays the same in all requests of the conversation."""
        shape, chance = self._shape, self._chance
        fields: dict[str, Any] = {
            "model": shape.model, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": shape.max_tokens, "temperature": 0,
            "thinking": {"type": "enabled" if chance.random() < shape.thinking_share else "disabled"},
        }  # fmt: skip
        if chance.random() < shape.sampled_share:
            fields |= {"temperature": chance.choice((0.6, 1.0)), "top_p": 0.95, "seed": chance.randrange(1 << 31)}
        if chance.random() < shape.tools_share:
            fields["tools"] = _TOOLS
        return fields


def _write(chance: random.Random, words: int) -> str:
    """A text of `words` words."""
    return " ".join(chance.choices(_WORDS, k=words))

"""How the replies of each protocol are written: where they tell the usage, why they ended, and that the answer began.

Marks are looked for in JSON as they stand outside of strings, where quotation marks are not escaped.
"""

import re
from typing import Any

import msgspec
from deepseek_recipe import ChatCompletionResponse, MessagesResponse, ResponsesResponse

from dsuf.types import Event

_BEGINS_ANSWER = re.compile(r'(?<!\\)"content":"[^"]')
_ENDS_RESPONSE = ('{"type":"response.completed"', '{"type":"response.incomplete"')
_ANSWERS = tuple(f'{{"type":"response.{kind}' for kind in ("output_text.delta", "function_call", "custom_tool_call"))


class Form:
    """How Chat Completions are written, and what the others do otherwise. One form serves one reply."""

    response: Any = ChatCompletionResponse
    prompt_details = "prompt_tokens_details"
    output_tokens = "completion_tokens"
    output_details = "completion_tokens_details"

    def tells_usage(self, data: str) -> bool:
        """Whether the event `data` has a usage."""
        return '"usage":{' in data

    def find_end(self, data: str) -> str | None:
        """Why the reply ended, if the event `data` says so."""
        if '_reason":"' not in data:
            return None
        event, reason = msgspec.json.decode(data), None
        for ending in (*event.get("choices", ()), event.get("delta", {})):
            reason = ending.get("finish_reason") or ending.get("stop_reason") or reason
        return reason

    def begins_answer(self, data: str) -> bool:
        """Whether the event `data` holds more than reasoning."""
        return '"tool_calls":' in data or _BEGINS_ANSWER.search(data) is not None

    def write(self, name: str | None, data: str) -> Event | None:
        """The event that the client gets for what the library wrote; None where it gets none."""
        return Event(name, data)

    def write_whole(self, data: str) -> str:
        """The whole reply, from the library's."""
        return data

    def fail(self, message: str, code: str) -> list[Event]:
        """The events with which the protocol ends a reply that failed, where it has a way of its own to say so."""
        return []


class CompletionForm(Form):
    """Raw completions, which the library writes as a chat. `echo` is text to begin with."""

    echo = ""

    def __init__(self) -> None:
        self._offset = 0

    def write(self, name: str | None, data: str) -> Event | None:
        """The chunk of a completion; the first one of a chat, which tells the role, is one only where it has text."""
        chunk = msgspec.json.decode(data)
        choice = chunk["choices"][0]
        begins = "role" in choice["delta"]
        text = self.echo if begins else choice["delta"].get("content") or ""
        if begins and not text:
            return None
        return Event(name, self._encode(chunk, text))

    def write_whole(self, data: str) -> str:
        """The whole completion."""
        reply = msgspec.json.decode(data)
        self._offset = 0
        return self._encode(reply, self.echo + (reply["choices"][0]["message"]["content"] or ""))

    def _encode(self, chat: dict[str, Any], text: str) -> str:
        """`chat`, a chunk or a whole reply, with its one choice as a completion has it."""
        choice = chat["choices"][0]
        probabilities = self._list_probabilities(choice["logprobs"])
        chat["object"] = "text_completion"
        chat["choices"] = [
            {"text": text, "index": 0, "logprobs": probabilities, "finish_reason": choice["finish_reason"]}
        ]
        return msgspec.json.encode(chat).decode()

    def _list_probabilities(self, chat: dict[str, Any] | None) -> dict[str, Any] | None:
        """Log-probabilities in parallel lists; the alternatives hold the token itself, too."""
        if not chat or not chat.get("content"):
            return None
        entries = chat["content"]
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in (*entry.get("top_logprobs", ()), entry)} for entry in entries
            ],
            "text_offset": offsets,
        }


class MessagesForm(Form):
    """Anthropic Messages."""

    response = MessagesResponse


class ResponsesForm(Form):
    """OpenAI Responses.

    Every event has a number, and the first holds the whole response as it begins, with the tools that the client sent:
    any name can stand in there.
    """

    response = ResponsesResponse
    prompt_details = "input_tokens_details"
    output_tokens = "output_tokens"
    output_details = "output_tokens_details"

    def __init__(self) -> None:
        self._first: str | None = None
        self._events = 0

    def tells_usage(self, data: str) -> bool:
        """Whether this is the last event."""
        return data.startswith(_ENDS_RESPONSE)

    def find_end(self, data: str) -> str | None:
        """Why the reply ended, in the words of Chat Completions."""
        if not data.startswith(_ENDS_RESPONSE):
            return None
        response = msgspec.json.decode(data)["response"]
        if response["status"] == "incomplete":
            reason = response["incomplete_details"]["reason"]
            return "length" if reason == "max_output_tokens" else str(reason)
        return "tool_calls" if any(item["type"].endswith("_call") for item in response["output"]) else "stop"

    def begins_answer(self, data: str) -> bool:
        """Whether the event holds text of the answer, or of a call."""
        return data.startswith(_ANSWERS)

    def write(self, name: str | None, data: str) -> Event | None:
        """The library's event, remembered as far as a failure will need it."""
        self._first = self._first or data
        self._events += 1
        return Event(name, data)

    def fail(self, message: str, code: str) -> list[Event]:
        """The event `response.failed`, with the response as it began."""
        if self._first is None:
            return []
        response = msgspec.json.decode(self._first)["response"]
        response |= {"status": "failed", "error": {"code": code, "message": message}}
        name = "response.failed"
        event = {"type": name, "response": response, "sequence_number": self._events}
        self._events += 1
        return [Event(name, msgspec.json.encode(event).decode())]

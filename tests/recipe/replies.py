"""Recorded kinds of replies, how to read them, and what a client makes of the events."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dsuf.recipe import conversion
from dsuf.recipe.conversion import Protocol
from dsuf.recipe.reader import Reader
from dsuf.recipe.render import CONVERT, Limits, render
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Event, Finish, Usage

LIMITS = Limits(context_tokens=1 << 20)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "number"}}}
TOOLS: dict[Protocol, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
    "messages": [{"name": "read", "input_schema": SCHEMA}],
    "responses": [{"type": "function", "name": "read", "parameters": SCHEMA}],
}


def parameter(name: str, value: str, string: bool = True) -> str:
    """One parameter of a call."""
    kind = "true" if string else "false"
    return f'<｜DSML｜ parameter name="{name}" string="{kind}">{value}</｜DSML｜ parameter>\n'


def invoke(*parameters: str, name: str = "read") -> str:
    """One call."""
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(parameters)}</｜DSML｜ invoke>\n'


def block(*invokes: str) -> str:
    """A block of calls, as the renderer writes it."""
    return f"\n\n<｜DSML｜ calls>\n{''.join(invokes)}</｜DSML｜ calls>"


CALL = block(invoke(parameter("path", "/etc/hosts")))
TWO_CALLS = block(invoke(parameter("path", 'a < b</p> "q" 世界')), invoke(parameter("n", "5", string=False)))
ASKS = {"chat": "messages", "messages": "messages", "responses": "input", "completions": "prompt"}
"""The field that holds what is asked."""
REPLIES = {
    "answer": "Hm, a greeting.</think>Hello there,\n  世界 👋🏽 <b>!",
    "call": "I look.</think>Let me see." + CALL,
    "two calls": "I look.</think>" + TWO_CALLS,
    "call inside reasoning": "I look." + CALL,
    "never closed": "I think and think < and",
    "closed twice": "One.</think>Two.</think>Three.",
    "opened again": "One.</think>Two.<think>Three.</think>Four.",
    "unknown tool": "Hm.</think>" + block(invoke(parameter("path", "x"), name="erase")),
    "call cut off": "Hm.</think>So." + CALL[:-60],
    "malformed call": "Hm.</think>So." + CALL.replace("invoke name", "involve nome"),
    "broken between good": "Hm.</think>"
    + block(invoke(parameter("path", "1")), "<｜DSML｜ invoke>\n</｜DSML｜ invoke>\n", invoke(parameter("path", "2"))),
    "text behind the block": "Hm.</think>So." + CALL + "\nAnd more.",
}


def open_reader(vocabulary: Vocabulary, protocol: Protocol = "chat", *, tools: bool = True, **fields: Any) -> Reader:
    """A reader for a small request with `fields`."""
    body = {"model": "deepseek-flash", ASKS[protocol]: [{"role": "user", "content": "Hi"}]} | fields
    if protocol == "completions":
        body["prompt"] = "Hi"
    elif tools:
        body["tools"] = TOOLS[protocol]
    return render(protocol, json.dumps(body).encode(), vocabulary, LIMITS).open_reader("id-1", vocabulary)


class Opener:
    """Opens readers as `open_reader` does, of a request that is converted once: for tests that read many times."""

    def __init__(self, vocabulary: Vocabulary, protocol: Protocol) -> None:
        body = {"model": "deepseek-flash", ASKS[protocol]: [{"role": "user", "content": "Hi"}]}
        body |= {"prompt": "Hi"} if protocol == "completions" else {"tools": TOOLS[protocol]}
        self._vocabulary = vocabulary
        self._conversion = conversion.read(CONVERT[protocol], json.dumps(body).encode(), vocabulary)

    def open(self) -> Reader:
        """A new reader; the form is the one part of a request that remembers what it wrote."""
        self._conversion.form = type(self._conversion.form)()
        return Reader(self._conversion, "id-1", self._vocabulary)


def read(reader: Reader, pieces: Iterable[Sequence[int]], finish: Finish = "stop") -> list[Event]:
    """All events of a reply that comes in `pieces`."""
    events = reader.open(Usage(computed_tokens=10))
    for piece in pieces:
        events += reader.feed(tuple(piece))
        if reader.finished:
            break
    return events + reader.finish(finish)


def read_text(vocabulary: Vocabulary, text: str, protocol: Protocol = "chat", **fields: Any) -> dict[str, Any]:
    """What a client gets of `text` as one piece."""
    return join(read(open_reader(vocabulary, protocol, **fields), [vocabulary.encode(text)]))


def cut(ids: Sequence[int], *places: int) -> list[Sequence[int]]:
    """`ids` in pieces that end at `places`."""
    ends = [0, *places, len(ids)]
    return [ids[start:stop] for start, stop in itertools.pairwise(ends)]


def encode_finely(vocabulary: Vocabulary, text: str) -> list[int]:
    """Ids of `text`, each character apart; only the marker tokens stay whole."""
    ids: list[int] = []
    while text:
        special = next((s for s in ("｜DSML｜", "</think>", "<think>") if text.startswith(s)), None)
        ids += [vocabulary.specials[special]] if special else vocabulary.encode(text[0])
        text = text[len(special or "x") :]
    return ids


def encode_bytes(vocabulary: Vocabulary, text: str) -> list[int]:
    """Ids of `text`, each byte apart; only the marker tokens stay whole."""
    singles = byte_ids(vocabulary)
    ids: list[int] = []
    while text:
        special = next((s for s in ("｜DSML｜", "</think>", "<think>") if text.startswith(s)), None)
        ids += [vocabulary.specials[special]] if special else [singles[byte] for byte in text[0].encode()]
        text = text[len(special or "x") :]
    return ids


def byte_ids(vocabulary: Vocabulary) -> dict[int, int]:
    """The token of each single byte, by GPT-2's table of stand-in characters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_ins = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    found = {byte: vocabulary.plain.token_to_id(character) for byte, character in stand_ins.items()}
    return {byte: id_ for byte, id_ in found.items() if id_ is not None}


def join(events: list[Event]) -> dict[str, Any]:
    """What a client makes of the events, in a form that is the same for all protocols."""
    objects = [json.loads(event.data) for event in events]
    reply: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "end": None, "tokens": 0}
    for name, text in _texts(objects, reply):
        reply[name] += text
    reply["calls"] = [tuple(call) for call in reply["calls"]]
    return reply


def _texts(objects: list[dict[str, Any]], reply: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Pieces of text; calls, end and tokens go into `reply`."""
    for item in objects:
        if item.get("object") == "text_completion":
            yield "content", item["choices"][0]["text"]
            reply["end"] = item["choices"][0]["finish_reason"]
            reply["tokens"] = (item["usage"] or {}).get("completion_tokens", 0)
        elif item.get("type", "").startswith("response."):
            yield from _response_texts(item, reply)
        elif "choices" in item:
            delta = item["choices"][0]["delta"]
            yield "reasoning", delta.get("reasoning_content") or ""
            yield "content", delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    reply["calls"].append([call["function"]["name"], ""])
                reply["calls"][call["index"]][1] += call["function"]["arguments"]
            reply["end"] = item["choices"][0]["finish_reason"]
            reply["tokens"] = (item["usage"] or {}).get("completion_tokens", 0)
        elif item["type"] == "content_block_start" and item["content_block"]["type"] == "tool_use":
            reply["calls"].append([item["content_block"]["name"], ""])
        elif item["type"] == "content_block_delta":
            delta = item["delta"]
            yield "reasoning", delta.get("thinking", "")
            yield "content", delta.get("text", "")
            if "partial_json" in delta:
                reply["calls"][-1][1] += delta["partial_json"]
        elif item["type"] == "message_delta":
            reply["end"], reply["tokens"] = item["delta"]["stop_reason"], item["usage"]["output_tokens"]


def _response_texts(item: dict[str, Any], reply: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The same of one event of Responses."""
    kind = item["type"].removeprefix("response.")
    if kind in ("reasoning_text.delta", "output_text.delta"):
        yield "reasoning" if kind.startswith("reasoning") else "content", item["delta"]
    elif kind == "output_item.added" and item["item"]["type"] == "function_call":
        reply["calls"].append([item["item"]["name"], ""])
    elif kind == "function_call_arguments.delta":
        reply["calls"][-1][1] += item["delta"]
    elif kind in ("completed", "incomplete"):
        reply["tokens"] = item["response"]["usage"]["output_tokens"]
        ended = "tool_calls" if reply["calls"] else "stop"
        reply["end"] = "length" if item["response"]["incomplete_details"] else ended

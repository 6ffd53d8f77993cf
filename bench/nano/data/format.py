"""Conversations in the model's prompt format, written without the official renderer.

It covers what training needs: a system text, tools, questions, calls, results, and answers with and without thinking.
What the renderer writes itself (the note on effort, the preamble on tools) comes out of the package as it wrote it.
"""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.nano.data.package import Package
from bench.nano.data.sample import Label, Piece, Sample, Span, Writer

Parts = tuple[str | Span | Piece, ...]
EFFORT_NAMES = {None: "none", 50: "low", 75: "high", 100: "max"}
EFFORTS = (75, 75, 75, 50, 100)  # of the renderer's efforts, the default most often


class Call(NamedTuple):
    """A tool call with string arguments."""

    tool: str
    arguments: dict[str, str]


class Exchange(NamedTuple):
    """What is asked (or what a tool gave) and what the model says to it: thoughts, then an answer or a call."""

    asked: Parts
    answer: tuple[Span, ...] = ()
    reasoning: str = ""
    call: Call | None = None
    is_result: bool = False


@dataclass
class Dialogue:
    """A conversation. With `effort` the model thinks first; `tools` are their schemas as JSON texts."""

    effort: int | None = None
    system: Parts = ()
    tools: tuple[str, ...] = ()
    exchanges: list[Exchange] = field(default_factory=list)


def write_sample(package: Package, dialogue: Dialogue) -> Sample:
    """The whole conversation, the model's words judged."""
    writer = Writer(package.tokenizer)
    _write_head(writer, package, dialogue)
    for number, exchange in enumerate(dialogue.exchanges):
        _write_asked(writer, package, exchange)
        _write_reply(writer, package, dialogue, number)
    return writer.finish()


def write_prompt(package: Package, dialogue: Dialogue, number: int) -> NDArray[np.int32]:
    """The ids from which the model answers exchange `number`; what came before is there as the renderer shows it."""
    before = Dialogue(dialogue.effort, dialogue.system, dialogue.tools, dialogue.exchanges[: number + 1])
    writer = Writer(package.tokenizer)
    _write_head(writer, package, before)
    for place, exchange in enumerate(before.exchanges):
        _write_asked(writer, package, exchange)
        if place < number:
            _write_reply(writer, package, before, place)
    writer.add_special(package.special["<think>" if dialogue.effort else "</think>"])
    return writer.finish().ids


def write_answer(package: Package, dialogue: Dialogue, number: int) -> NDArray[np.int32]:
    """The ids of the answer or call of exchange `number`, thoughts left out, the end of sentence with it."""
    writer = Writer(package.tokenizer)
    _write_answer(writer, package, dialogue.exchanges[number])
    return writer.finish().ids


def write_thoughts(package: Package, dialogue: Dialogue, number: int) -> NDArray[np.int32]:
    """The ids of the thoughts of exchange `number` and of their end; none where the model does not think."""
    writer = Writer(package.tokenizer)
    if dialogue.effort:
        writer.add(dialogue.exchanges[number].reasoning)
        writer.add_special(package.special["</think>"])
    return writer.finish().ids


def list_messages(package: Package, dialogue: Dialogue, number: int) -> dict[str, Any]:
    """The body of a chat request that asks for exchange `number`."""
    messages: list[dict[str, Any]] = []
    if dialogue.system:
        messages.append({"role": "system", "content": read_parts(package, dialogue.system)})
    for place, exchange in enumerate(dialogue.exchanges[: number + 1]):
        asked = read_parts(package, exchange.asked)
        if exchange.is_result:
            messages.append({"role": "tool", "tool_call_id": f"call-{place - 1}", "content": asked})
        else:
            messages.append({"role": "user", "content": asked})
        if place < number:
            messages.append(_list_reply(exchange, place, bool(dialogue.effort)))
    tools = [{"type": "function", "function": json.loads(schema)} for schema in dialogue.tools]
    effort = EFFORT_NAMES[dialogue.effort]
    return {"messages": messages, "reasoning_effort": effort} | ({"tools": tools} if tools else {})


def read_parts(package: Package, parts: Parts) -> str:
    """The text of `parts`."""
    return "".join(
        package.decode(part.ids) if isinstance(part, Piece) else part if isinstance(part, str) else part.text
        for part in parts
    )


def _list_reply(exchange: Exchange, place: int, thinks: bool) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "".join(span.text for span in exchange.answer)}
    if thinks:
        reply["reasoning_content"] = exchange.reasoning
    if exchange.call is not None:
        function = {"name": exchange.call.tool, "arguments": json.dumps(exchange.call.arguments)}
        reply["tool_calls"] = [{"id": f"call-{place}", "type": "function", "function": function}]
    return reply


def _write_head(writer: Writer, package: Package, dialogue: Dialogue) -> None:
    """Beginning of sentence and the system part, which is left out where it would be empty."""
    writer.add_special(package.special["<｜begin▁of▁sentence｜>"])
    if not (dialogue.effort or dialogue.system or dialogue.tools):
        return
    writer.add_special(package.special["<｜System｜>"])
    if dialogue.effort:
        writer.add(package.effort_note.replace("75", str(dialogue.effort)))
    writer.add(*dialogue.system)
    if dialogue.tools:
        before, after = package.tools_preamble
        _add_marked(writer, package, before)
        writer.add("\n".join(dialogue.tools) + after)


def _write_asked(writer: Writer, package: Package, exchange: Exchange) -> None:
    writer.add_special(package.special["<｜User｜>"])
    if exchange.is_result:
        writer.add("<tool_result>", *exchange.asked, "</tool_result>")
    else:
        writer.add(*exchange.asked)
    writer.add_special(package.special["<｜Assistant｜>"])


def _write_reply(writer: Writer, package: Package, dialogue: Dialogue, number: int) -> None:
    """Thoughts and answer. Thoughts of earlier exchanges stay only where there are tools."""
    exchange = dialogue.exchanges[number]
    if dialogue.effort and (dialogue.tools or number == len(dialogue.exchanges) - 1):
        writer.add_special(package.special["<think>"])
        writer.add(Span(exchange.reasoning, Label.ANSWER))
        writer.add_special(package.special["</think>"], Label.ANSWER)
    else:
        writer.add_special(package.special["</think>"])
    _write_answer(writer, package, exchange)


def _write_answer(writer: Writer, package: Package, exchange: Exchange) -> None:
    writer.add(*exchange.answer)
    if exchange.call is not None:
        _add_marked(writer, package, _spell_call(exchange.call), Label.ANSWER)
    writer.add_special(package.special["<｜end▁of▁sentence｜>"], Label.ANSWER)


def _spell_call(call: Call) -> str:
    rows = "".join(
        f'<｜DSML｜ parameter name="{name}" string="true">{value}</｜DSML｜ parameter>\n'
        for name, value in call.arguments.items()
    )
    return f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{call.tool}">\n{rows}</｜DSML｜ invoke>\n</｜DSML｜ calls>'


def _add_marked(writer: Writer, package: Package, text: str, label: Label = Label.NONE) -> None:
    """Text in which the mark of tool calls is a token of its own."""
    for number, part in enumerate(text.split("｜DSML｜")):
        if number:
            writer.add_special(package.special["｜DSML｜"], label)
        writer.add(Span(part, label))

"""Grammars of call blocks: what they accept and what not; the canonical spelling is that of the library's renderer."""

import json
from typing import Any

import deepseek_recipe
import pytest

from dsuf.recipe.grammar import write_calls, write_json, write_regex
from dsuf.recipe.masks import Masks
from dsuf.recipe.render import Limits, render
from dsuf.recipe.vocabulary import Vocabulary

TOOLS = [
    {"name": "get", "parameters": {
        "type": "object", "required": ["a"],
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"},
                       "e": {"enum": ["x/y", "b.c", 3]}}}},
    {"name": "get_more", "parameters": {"type": "object", "properties": {}}},
    {"name": "odd", "parameters": {
        "type": "object", "additionalProperties": True, "$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}}}},
        "properties": {"q": {"type": "string", "pattern": "^a/b+$"}, "l": {"type": ["string", "null"], "maxLength": 3},
                       "b": {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3},
                       "w": {"allOf": [{"enum": ["one", "two"]}]},
                       "r": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}, {"type": "string"}]}}}},
]  # fmt: skip
END = "</｜DSML｜ calls>"


def call(name: str, *parameters: tuple[str, str, str]) -> str:
    """A call in canonical spelling, from (name, string, value)."""
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{kind}">{value}</｜DSML｜ parameter>'
        for key, kind, value in parameters
    ]
    return f'<｜DSML｜ invoke name="{name}">\n' + "\n".join(lines) + "\n</｜DSML｜ invoke>\n"


@pytest.fixture(scope="module")
def masks(vocabulary: Vocabulary) -> Masks:
    return Masks(vocabulary, vocabulary.size)


def accepts(masks: Masks, grammar: str, text: str) -> bool:
    """Whether `text` is whole under `grammar`."""
    ids, matcher = masks.vocabulary.encode(text), masks.copy(grammar)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


GOOD = {
    "text with angles": call("get", ("a", "true", "x</y\n z")),
    "empty text": call("get", ("a", "true", "")),
    "skips optional": call("get", ("a", "true", "s"), ("o", "false", '{"k": [1, 2]}')),
    "enum of text": call("get", ("a", "true", "s"), ("e", "true", "x/y")),
    "enum of numbers": call("get", ("a", "true", "s"), ("e", "false", "3")),
    "two calls": call("get_more") + call("get", ("a", "true", "s"), ("n", "false", "-3")),
    "nothing declared": call("get_more", ("any", "true", "text"), ("more", "false", "[1]")),
    "pattern": call("odd", ("q", "true", "a/bb")),
    "of two types": call("odd", ("l", "false", "null"), ("r", "true", "text")),
    "recursive": call("odd", ("r", "false", '{"t": {"t": {}}}')),
    "undeclared behind": call("odd", ("l", "true", "abc"), ("free", "true", "?")),
    "no parameters": call("odd"),
    "pattern and length": call("odd", ("b", "true", "aaa"), ("w", "true", "two")),
}
BAD = {
    "no call": "",
    "unknown tool": call("no"),
    "without what is required": call("get"),
    "in another order": call("get", ("n", "false", "3"), ("a", "true", "x")),
    "twice": call("get", ("a", "true", "x"), ("a", "true", "x")),
    "undeclared": call("get", ("a", "true", "x"), ("z", "true", "x")),
    "another type": call("get", ("a", "true", "x"), ("n", "false", "true")),
    "text as JSON": call("get", ("a", "false", '"x"')),
    "not in the enum": call("get", ("a", "true", "x"), ("e", "true", "b+c")),
    "against the pattern": call("odd", ("q", "true", "a/c")),
    "too long": call("odd", ("l", "true", "abcd")),
    "pattern, but too long": call("odd", ("b", "true", "aaaa")),
    "length, but against the pattern": call("odd", ("b", "true", "ab")),
    "not in the one of all": call("odd", ("w", "true", "three")),
    "the older spelling": call("get", ("a", "true", "x")).replace("｜DSML｜ ", "｜DSML｜"),
}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_blocks_of_calls(masks: Masks, name: str, opened: bool) -> None:
    grammar = write_calls(TOOLS, masks.vocabulary.dsml_id, opened=opened)
    block = ("" if opened else " calls>\n") + (GOOD | BAD)[name] + END
    assert accepts(masks, grammar, block) == (name in GOOD)


def test_text_behind_the_block_is_none(masks: Masks) -> None:
    grammar = write_calls(TOOLS, masks.vocabulary.dsml_id, opened=True)
    assert not accepts(masks, grammar, call("get_more") + END + " so")


def test_a_loose_tool_takes_anything(masks: Masks) -> None:
    grammar = write_calls(TOOLS, masks.vocabulary.dsml_id, opened=True, loose=["get"])
    assert accepts(masks, grammar, call("get", ("z", "false", "3")) + END)
    assert not accepts(masks, grammar, call("odd", ("q", "true", "no")) + END)


def test_what_the_renderer_writes_is_accepted(masks: Masks) -> None:
    """Calls of earlier turns stand in prompts in the one spelling that new ones are kept to."""
    calls = [("get", {"a": "x\ny", "n": 3, "o": {"k": [1, {"ü": None}]}}), ("get_more", {}), ("odd", {"l": None})]
    listed = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    answers = [{"role": "tool", "tool_call_id": str(i), "content": "ok"} for i in range(len(calls))]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": listed}, *answers]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    prompt = _render_text(masks.vocabulary, messages=messages, tools=tools)
    block = prompt.rpartition("<｜DSML｜ calls>")[2].partition(END)[0]
    grammar = write_calls(TOOLS, masks.vocabulary.dsml_id, opened=False)
    assert accepts(masks, grammar, " calls>" + block + END)


def _render_text(vocabulary: Vocabulary, **fields: Any) -> str:
    body = json.dumps({"model": "deepseek-flash", **fields}).encode()
    return vocabulary.decode(render("chat", body, vocabulary, Limits(context_tokens=100_000)).prompt.ids)


def test_plain_grammars(masks: Masks) -> None:
    assert accepts(masks, write_json(""), '{"a": [1, {}]}') and not accepts(masks, write_json(""), "[1]")
    assert accepts(masks, write_json('{"type":"array"}'), "[1,\n  2]")
    assert not accepts(masks, write_json('{"type":"array"}'), "[1,    2]")  # white space has a bound
    assert accepts(masks, write_regex("[a-c]{2}"), "ab") and not accepts(masks, write_regex("[a-c]{2}"), "abc")
    assert deepseek_recipe.SpecialTokens().token(deepseek_recipe.SpecialToken.Dsml) in END

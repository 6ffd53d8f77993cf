"""Masks of turns: where they begin, what drafts do to them, and the constraints that requests come to."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dsuf.errors import InvalidRequest, UnsupportedFeature
from dsuf.recipe.grammar import write_calls, write_json, write_regex
from dsuf.recipe.masks import Masks
from dsuf.recipe.render import Limits, Rendered, count_prompt, render
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Allowed, Constraint, Mask, Usage

OFF = {"type": "disabled"}


@pytest.fixture(scope="module")
def masks(vocabulary: Vocabulary) -> Masks:
    return Masks(vocabulary, vocabulary.size + 40)  # logits may be more than there are tokens


def ask(mask: Mask, ids: Sequence[int] = (), drafts: Sequence[int] = ()) -> Allowed:
    return mask.ask(ids, drafts).result(timeout=60)


def tokens(masks: Masks, row: bytes | None) -> set[int] | None:
    """The ids that a row allows; None where all are."""
    if row is None:
        return None
    bits = np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little")
    assert len(bits) == -(-(masks.vocabulary.size + 40) // 32) * 32
    return set(np.flatnonzero(bits).tolist())


def test_a_grammar_from_the_first_token(masks: Masks) -> None:
    mask = masks.open(Constraint(grammar=write_regex("ab|ac")))
    first = tokens(masks, ask(mask).rows[0])
    spelt = {masks.vocabulary.decode([token]) for token in first or ()}
    assert spelt == {"a", "ab", "ac"}
    end = ask(mask, masks.vocabulary.encode("ab")).rows[0]
    assert tokens(masks, end) == {masks.vocabulary.eos_id}


def test_behind_the_reasoning(masks: Masks) -> None:
    """Until it is over anything may come but the end and a call; the token that ends it may be a draft."""
    vocabulary, mask = masks.vocabulary, masks.open(Constraint(grammar=write_regex("no"), begins="answer"))
    thinking = vocabulary.encode("Let me think.")
    rows = ask(mask, thinking, [*vocabulary.encode("!"), vocabulary.thinking_end_id]).rows
    free = tokens(masks, rows[0])
    assert free == tokens(masks, rows[1]) == set(range(vocabulary.size + 40)) - {vocabulary.eos_id, vocabulary.dsml_id}
    assert tokens(masks, rows[2]) == set(vocabulary.encode("no"))
    assert tokens(masks, ask(mask, vocabulary.encode("!")).rows[0]) == free
    assert ask(mask, [vocabulary.thinking_end_id]).rows[0] == rows[2]


def test_a_block_of_calls_wherever_it_begins(masks: Masks) -> None:
    """Free, until a marker stands behind an angle; a closing tag, or a marker alone, opens nothing."""
    vocabulary = masks.vocabulary
    grammar = write_calls([{"name": "f"}], vocabulary.dsml_id, opened=False)
    for text, opens in (("So:\n\n<｜DSML｜", True), ("</｜DSML｜", False), ("｜DSML｜", False), ("plain", False)):
        mask = masks.open(Constraint(grammar=grammar, begins="call"))
        row = tokens(masks, ask(mask, vocabulary.encode(text)).rows[0])
        assert (row is not None) == opens
        if row is not None:
            assert vocabulary.encode(" calls")[0] in row and vocabulary.eos_id not in row


def test_rows_behind_drafts_are_those_of_the_same_tokens_taken(masks: Masks) -> None:
    """Whatever was asked about drafts before; there are no rows behind one that may not come."""
    vocabulary = masks.vocabulary
    reply = vocabulary.encode('<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x</y')
    constraint = Constraint(grammar=write_calls([{"name": "f"}], vocabulary.dsml_id, opened=True))
    plain, drafted = masks.open(constraint), masks.open(constraint)
    alone = [ask(plain).rows[0]] + [ask(plain, [token]).rows[0] for token in reply]
    for start in range(len(reply)):
        wrong = [*reply[start : start + 3], vocabulary.eos_id, 5]
        taken = reply[start - 1 : start] if start else []
        assert list(ask(drafted, taken, wrong).rows) == alone[start : min(start + 3, len(reply)) + 1]


def test_tokens_before_count(masks: Masks) -> None:
    """A turn that was put back goes on where it was."""
    reply = masks.vocabulary.encode('{"a": [1, 2')
    constraint = Constraint(grammar=write_json(""))
    whole, again = masks.open(constraint), masks.open(constraint)
    for token in reply:
        last = ask(whole, [token])
    assert ask(again, reply) == last


def test_a_fault_ends_the_turn(masks: Masks) -> None:
    """A token that the grammar does not have cannot be taken: only the end may come, and the reason is told."""
    mask = masks.open(Constraint(grammar=write_regex("ab")))
    allowed = ask(mask, masks.vocabulary.encode("x"), masks.vocabulary.encode("b"))
    assert allowed.fault and tokens(masks, allowed.rows[0]) == {masks.vocabulary.eos_id}
    assert len(allowed.rows) == 1 and ask(mask).fault == allowed.fault


def chat(masks: Masks | None, vocabulary: Vocabulary, **fields: Any) -> Rendered:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "json"}], **fields}
    return render("chat", json.dumps(body).encode(), vocabulary, Limits(context_tokens=100_000), masks=masks)


def messages(masks: Masks | None, vocabulary: Vocabulary, **fields: Any) -> Rendered:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "json"}], **fields}
    return render("messages", json.dumps(body).encode(), vocabulary, Limits(context_tokens=100_000), masks=masks)


def schema_of(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tools_of(parameters: object, **more: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


def test_where_constraints_begin(masks: Masks, vocabulary: Vocabulary) -> None:
    for fields, begins in (
        ({"response_format": {"type": "json_object"}}, "answer"),
        ({"response_format": {"type": "json_object"}, "thinking": OFF}, "now"),
        ({"response_format": {"type": "regex", "regex": "^a+$"}, "thinking": OFF}, "now"),
        ({"tools": tools_of({"type": "object"})}, "call"),
        ({"tools": tools_of({"type": "object"}), "tool_choice": "required", "thinking": OFF}, "now"),
    ):
        constraint = chat(masks, vocabulary, **fields).constraint
        assert constraint is not None and (constraint.begins, constraint.spent) == (begins, 0)
    assert chat(masks, vocabulary).constraint is None


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_call_of_any_tool_that_messages_ask_for(masks: Masks, vocabulary: Vocabulary, thinking: str) -> None:
    """The prompt is that of a free choice, so the answer as a whole is a block of calls, behind the reasoning."""
    fields = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "thinking": {"type": thinking}}
    free, forced = (messages(masks, vocabulary, tool_choice={"type": kind}, **fields) for kind in ("auto", "any"))
    assert forced.prompt == free.prompt and forced.constraint is not None and free.constraint is not None
    assert (forced.constraint.begins, free.constraint.begins) == ("answer" if thinking == "enabled" else "now", "call")
    mask = masks.open(forced.constraint)
    reasoning = [vocabulary.thinking_end_id] if thinking == "enabled" else []
    call = '<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>'
    block = vocabulary.encode(f"\n\n<｜DSML｜ calls>\n{call}\n</｜DSML｜ calls>")
    rows = ask(mask, reasoning, block).rows
    assert len(rows) == len(block) + 1 and tokens(masks, rows[-1]) == {vocabulary.eos_id}
    assert {vocabulary.decode([token])[0] for token in tokens(masks, rows[0]) or ()} == {"\n"}


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_no_call_where_none_may_be_made(masks: Masks, vocabulary: Vocabulary, thinking: str) -> None:
    """The mark of calls never comes, neither in the reasoning nor behind it; all text and the end do."""
    own = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"}}
    kept = messages(masks, vocabulary, thinking={"type": thinking}, **own).constraint
    assert (
        kept == chat(masks, vocabulary, tools=tools_of({}), tool_choice="none", thinking={"type": thinking}).constraint
    )
    assert kept is not None
    mask = masks.open(kept)
    reasoning = [*vocabulary.encode("I <"), vocabulary.thinking_end_id] if thinking == "enabled" else []
    text = vocabulary.encode('Grüße, 世界 <calls> {"a": 1}')
    rows = [*ask(mask, (), reasoning).rows, *ask(mask, reasoning, text).rows]
    assert len(rows) == len(reasoning) + len(text) + 2
    for row in rows:
        allowed = tokens(masks, row) or set()
        assert vocabulary.dsml_id not in allowed and {*vocabulary.encode("any <text")} <= allowed
    assert vocabulary.eos_id in (tokens(masks, rows[-1]) or ())
    without = messages(masks, vocabulary, tool_choice={"type": "none"}, thinking={"type": thinking})
    assert without.constraint is None


def test_a_call_of_one_tool_that_messages_ask_for(masks: Masks, vocabulary: Vocabulary) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
    kept = messages(masks, vocabulary, tools=tools, tool_choice={"type": "tool", "name": "g"}, thinking=OFF)
    assert kept.prompt.opens_in == "call" and kept.constraint is not None and kept.constraint.begins == "now"
    for name, allowed in (("f", False), ("g", True)):
        drafts = vocabulary.encode(f'<｜DSML｜ invoke name="{name}">\n')
        assert (len(ask(masks.open(kept.constraint), (), drafts).rows) > len(drafts)) == allowed


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
CALLABLE = [{"name": "f", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_form_that_messages_ask_for(masks: Masks, vocabulary: Vocabulary, thinking: str) -> None:
    """Prompt and masks are those of a chat that asks for it, under both names."""
    chosen = {"thinking": {"type": thinking}}
    form = {"type": "json_schema", "schema": SCHEMA}
    as_chat = chat(masks, vocabulary, response_format=schema_of(SCHEMA), **chosen)
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        kept = messages(masks, vocabulary, **fields, **chosen)
        assert (kept.prompt, kept.constraint) == (as_chat.prompt, as_chat.constraint)
        assert (
            takes(masks, kept, '{"a": 9}') and not takes(masks, kept, '{"a": 10}') and not takes(masks, kept, "Nine.")
        )
    body = {
        "model": "deepseek-flash",
        "messages": [{"role": "user", "content": "json"}],
        "output_format": form,
        **chosen,
    }
    assert tuple(count_prompt("messages", json.dumps(body).encode(), vocabulary)) == kept.prompt.ids
    for none in ({"output_config": {"format": None}}, {"output_format": None}, {"response_format": schema_of(SCHEMA)}):
        assert messages(masks, vocabulary, **none, **chosen).constraint is None


def test_a_form_beside_tools_that_messages_may_call(masks: Masks, vocabulary: Vocabulary) -> None:
    """As in a chat: calls win, and without a choice the form holds; the rest of the prompt is the same."""
    form = {"type": "json_schema", "schema": SCHEMA}
    free, kept = (messages(masks, vocabulary, tools=CALLABLE, output_format=one) for one in (None, form))
    assert free.constraint == kept.constraint is not None and kept.constraint.begins == "call"
    told = (
        f"\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{json.dumps(SCHEMA)}"
    )
    assert told in vocabulary.decode(kept.prompt.ids)
    assert vocabulary.decode(kept.prompt.ids).replace(told, "") == vocabulary.decode(free.prompt.ids)
    without = messages(masks, vocabulary, tools=CALLABLE, tool_choice={"type": "none"}, output_format=form)
    assert without.constraint is not None and without.constraint.begins == "answer"


@pytest.mark.parametrize(
    "form", [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "schema": 3}, "json"]
)
def test_a_form_of_messages_that_is_none(masks: Masks, vocabulary: Vocabulary, form: object) -> None:
    with pytest.raises(InvalidRequest, match=r"`output_config\.format` must be of type `json_schema`"):
        messages(masks, vocabulary, output_config={"format": form})


def test_what_cannot_be_compiled(masks: Masks, vocabulary: Vocabulary) -> None:
    """The reason is the library's. Tools that are not strict may then be called with anything."""
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    for fields, reason in (
        ({"response_format": schema_of(bad)}, "look-around"),
        ({"response_format": schema_of({"not": {}})}, "Unimplemented keys"),
        ({"response_format": {"type": "regex", "regex": "(a"}}, "unclosed group"),
        ({"tools": tools_of(bad, strict=True)}, "tool f: .*look-around"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            chat(masks, vocabulary, **fields)
    assert chat(masks, vocabulary, tools=tools_of(bad)).constraint is not None


RING = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}


def object_of(value: object, name: str = "a", **more: object) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False, **more}


HOPELESS = [
    object_of({"type": "string", "pattern": "^[a-z]{5}$", "maxLength": 3}),
    object_of({"type": "string", "pattern": r"^[^\s\S]$"}),
    object_of({"type": "string"}, 'a"b'),
    object_of({"type": "string"}, "a\\b"),
    object_of({"type": "array", "items": {"$ref": "#/$defs/a"}}, **{"$defs": RING}),
]


def test_what_nothing_follows(masks: Masks, vocabulary: Vocabulary) -> None:
    """It is told before the first token, though the library compiles it."""
    for schema in ({"$ref": "#"}, {"$defs": RING, "$ref": "#/$defs/a"}, HOPELESS[-1]):
        with pytest.raises(InvalidRequest, match="back to itself"):
            chat(masks, vocabulary, response_format=schema_of(schema))
    for pattern, reason in ((r"a[^\s\S]", "no text"), ("a{1000000}", "too many"), ("\\", "backslash")):
        with pytest.raises(InvalidRequest, match=reason):
            chat(masks, vocabulary, response_format={"type": "regex", "regex": pattern})
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert chat(masks, vocabulary, response_format=schema_of(tree)).constraint is not None
    assert takes(masks, chat(masks, vocabulary, response_format={"type": "regex", "regex": r"a\\$"}), "a\\")


@pytest.mark.parametrize("parameters", HOPELESS)
def test_a_tool_that_no_call_follows(masks: Masks, vocabulary: Vocabulary, parameters: dict[str, Any]) -> None:
    """It may be called with anything, unless it is strict."""
    with pytest.raises(InvalidRequest, match="tool f: "):
        chat(masks, vocabulary, tools=tools_of(parameters, strict=True))
    kept = chat(masks, vocabulary, tools=tools_of(parameters), tool_choice="required", thinking=OFF)
    for name, right in (("any", True), ("a\\b", False), ("a\tb", False)):
        call = f'<｜DSML｜ parameter name="{name}" string="true">any</｜DSML｜ parameter>\n</｜DSML｜ invoke>'
        assert takes(masks, kept, f'<｜DSML｜ invoke name="f">\n{call}\n</｜DSML｜ calls>') == right


def test_maps_of_strict_schemas(masks: Masks, vocabulary: Vocabulary) -> None:
    schema = object_of({"type": "object", "additionalProperties": {"type": "integer"}})
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    kept = chat(masks, vocabulary, response_format=form, thinking=OFF)
    assert takes(masks, kept, '{"a": {"b": 1, "c": 2}}') and not takes(masks, kept, '{"a": {"b": "1"}}')
    tools = tools_of(schema, strict=True)
    kept = chat(masks, vocabulary, tools=tools, tool_choice="required", thinking=OFF)
    for value, right in (('{"b": 1}', True), ('{"b": "1"}', False)):
        call = f'<｜DSML｜ parameter name="a" string="false">{value}</｜DSML｜ parameter>\n</｜DSML｜ invoke>'
        assert takes(masks, kept, f'<｜DSML｜ invoke name="f">\n{call}\n</｜DSML｜ calls>') == right


def test_very_many_properties(masks: Masks, vocabulary: Vocabulary) -> None:
    """Two thousand that must come are served; so many that need not are too many, in words that say so."""
    names = {f"p{i}": {"type": "integer"} for i in range(2_000)}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": object_of(None, properties=names)},
    }
    kept = chat(masks, vocabulary, response_format=form, thinking=OFF)
    assert takes(masks, kept, json.dumps(dict.fromkeys(names, 1)))
    form["json_schema"] = {"name": "x", "schema": {"type": "object", "properties": names}}
    with pytest.raises(InvalidRequest, match=r"too many ways to go on .* optional properties \(8007, at most 2000\)"):
        chat(masks, vocabulary, response_format=form, thinking=OFF)


def test_a_fault_behind_drafts(masks: Masks) -> None:
    """It belongs to the last row, so that a reply that ends before it has none."""
    loop = json.dumps(object_of({"$ref": "#/$defs/a"}, **{"$defs": RING}))
    drafts = masks.vocabulary.encode('{"a":')
    mask = masks.open(Constraint(grammar=write_json(loop)))
    allowed = ask(mask, (), drafts)
    assert allowed.fault and len(allowed.rows) == len(drafts) + 1
    assert tokens(masks, allowed.rows[-1]) == {masks.vocabulary.eos_id} and ask(mask).fault is None


BOUNDED = {
    "type": "object", "additionalProperties": False, "required": ["a", "b"],
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "b": {"type": "string", "maxLength": 3},
    },
}  # fmt: skip
LIMITS = Limits(context_tokens=100_000)


@pytest.mark.parametrize("strict", [True, False])
def test_bounds_of_a_strict_schema_hold(masks: Masks, vocabulary: Vocabulary, strict: bool) -> None:
    """The library leaves them out of a strict schema, wherever it stands."""
    text = {"type": "json_schema", "name": "x", "schema": BOUNDED, "strict": strict}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOUNDED, "strict": strict}}
    body = {"model": "deepseek-flash", "input": "json", "reasoning": {"effort": "none"}, "text": {"format": text}}
    for kept in (
        chat(masks, vocabulary, response_format=form, thinking=OFF),
        render("responses", json.dumps(body).encode(), vocabulary, LIMITS, masks=masks),
    ):
        assert takes(masks, kept, '{"a": [1, 2], "b": "abc"}')
        for wrong in (
            '{"a": [1, 2, 3], "b": "abc"}',
            '{"a": [1, 2], "b": "abcd"}',
            '{"a": [1]}',
            '{"a": [], "b": "", "c": 1}',
        ):
            assert not takes(masks, kept, wrong)


def test_a_strict_schema_with_a_reference_within_a_choice(masks: Masks, vocabulary: Vocabulary) -> None:
    """What SDKs make of an optional member that is a class. All properties are then needed, and there are no others."""
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}}
    schema = {
        "type": "object", "$defs": {"Inner": inner},
        "properties": {"one": {"anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}]}},
    }  # fmt: skip
    text = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = {"model": "deepseek-flash", "input": "json", "reasoning": {"effort": "none"}, "text": {"format": text}}
    for kept in (
        chat(masks, vocabulary, response_format={"type": "json_schema", "json_schema": text}, thinking=OFF),
        render("responses", json.dumps(body).encode(), vocabulary, LIMITS, masks=masks),
    ):
        assert takes(masks, kept, '{"one": {"n": 3}}') and takes(masks, kept, '{"one": null}')
        for wrong in ("{}", '{"one": {}}', '{"one": null, "two": 2}'):
            assert not takes(masks, kept, wrong)
    told = kept.open_reader("resp_1", vocabulary).open(Usage(computed_tokens=1))
    assert '"strict":true' in "".join(event.data for event in told), "a response repeats what was asked for"


def test_bounds_of_a_strict_tool_hold(masks: Masks, vocabulary: Vocabulary) -> None:
    """In every protocol, and in a namespace."""
    tool = {"name": "f", "parameters": BOUNDED, "strict": True}
    inner = {"type": "function", **tool}
    asked = {"model": "deepseek-flash", "input": "x", "reasoning": {"effort": "none"}, "tool_choice": "required"}

    def respond(tools: list[dict[str, Any]]) -> Rendered:
        body = json.dumps({**asked, "tools": tools}).encode()
        return render("responses", body, vocabulary, LIMITS, masks=masks)

    whole = [{"type": "function", "function": tool}]
    named = [{"name": "f", "input_schema": BOUNDED, "strict": True}]
    for kept, name in (
        (chat(masks, vocabulary, tools=whole, tool_choice="required", thinking=OFF), "f"),
        (messages(masks, vocabulary, tools=named, tool_choice={"type": "tool", "name": "f"}, thinking=OFF), "f"),
        (respond([inner]), "f"),
        (respond([{"type": "namespace", "name": "n", "description": "", "tools": [inner]}]), "n::f"),
    ):
        for items, right in (("[1, 2]", True), ("[1, 2, 3]", False)):
            parameters = f'<｜DSML｜ parameter name="a" string="false">{items}</｜DSML｜ parameter>\n'
            parameters += '<｜DSML｜ parameter name="b" string="true">abc</｜DSML｜ parameter>\n'
            call = f'<｜DSML｜ invoke name="{name}">\n{parameters}</｜DSML｜ invoke>\n</｜DSML｜ calls>'
            assert takes(masks, kept, call) == right, (name, items)
    bad = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": True}]
    with pytest.raises(InvalidRequest, match="tool f: "):
        messages(masks, vocabulary, tools=bad)


def takes(masks: Masks, kept: Rendered, text: str) -> bool:
    """Whether `text` is a whole answer."""
    assert kept.constraint is not None
    ids, matcher = masks.vocabulary.encode(text), masks.copy(kept.constraint.grammar)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_an_engine_that_keeps_to_no_constraint(vocabulary: Vocabulary) -> None:
    assert chat(None, vocabulary, tools=tools_of({"type": "object"})).constraint is None
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"tools": tools_of({"type": "object"}), "tool_choice": "required", "thinking": OFF},
    ):
        with pytest.raises(UnsupportedFeature):
            chat(None, vocabulary, **fields)
    with pytest.raises(UnsupportedFeature, match=r"output_config\.format"):
        messages(None, vocabulary, output_format={"type": "json_schema", "schema": SCHEMA})


def test_a_begun_answer_counts(masks: Masks, vocabulary: Vocabulary) -> None:
    """What the client has begun of the answer must follow the format, and the reply goes on from there."""
    begun = [{"role": "user", "content": "json"}, {"role": "assistant", "content": '{"a', "prefix": True}]
    kept = chat(masks, vocabulary, messages=begun, thinking=OFF, response_format=schema_of({"type": "object"}))
    assert kept.constraint is not None and kept.constraint.spent == len(vocabulary.encode('{"a'))
    row = tokens(masks, ask(masks.open(kept.constraint), kept.prompt.ids[-kept.constraint.spent :]).rows[0])
    assert vocabulary.encode('"')[0] in (row or ())
    with pytest.raises(InvalidRequest, match="prefix"):
        chat(masks, vocabulary, messages=begun, thinking=OFF, response_format=schema_of({"type": "array"}))


def test_grammars_are_compiled_once(masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = write_regex("once")
    masks.check(grammar)
    monkeypatch.setattr(masks, "_compile", lambda _: pytest.fail("compiled again"))
    masks.check(grammar)
